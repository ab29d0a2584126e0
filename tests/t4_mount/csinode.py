"""A node with the driver's pod, as kubelet calls it, and what its volumes look like."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import grpc
import pytest
from realmount import PATIENCE_S, until

from stepfs.csi.messages import MESSAGES
from stepfs.mount.host import mount_points, mount_table

READ_ONLY_MANY = {"mount": {}, "access_mode": {"mode": 3}}


def _serve(words: list[str], environment: dict[str, str], log: str) -> None:
    with open(log, "ab") as file:
        forked.take_over(environment, "/", os.dup(file.fileno()), os.dup(file.fileno()))
    from stepfs.csi.__main__ import main  # noqa: PLC0415

    sys.exit(main(words))


class Served:
    """A process that was forked from one that has imported everything: of `subprocess.Popen` what a node needs."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


class Node:
    """A node with the driver's pod: a holder and a plugin."""

    def __init__(self, directory: Path, *before: str, **variables: str | None) -> None:
        """`before`: what the holder is started by; `variables`: of its environment, None: it has none."""
        self.directory, self.before = directory, before
        self.environment = {name: value for name, value in (os.environ | variables).items() if value is not None}
        self.base, self.socket = directory / "base", directory / "csi.sock"
        self.more: list[str] = []  # arguments of the plugin
        self.holder, self.plugin = self._start("holder"), self._start("plugin")
        self.channel = self._connected()
        until((directory / "holder.sock").exists, "the holder listens")

    def _connected(self) -> grpc.Channel:
        channel = grpc.insecure_channel(f"unix://{self.socket}")
        grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)
        return channel

    def _start(self, role: str) -> subprocess.Popen[bytes] | Served:
        words = [
            "--endpoint",
            self.socket,
            "--holder",
            self.directory / "holder.sock",
            "--base",
            self.base,
            "--node",
            "n1",
        ]
        words = [role, *map(str, words), *(self.more if role == "plugin" else ())]
        if role == "plugin" or not self.before:
            return self._forked(words)
        with (self.directory / f"{role}.log").open("ab") as log:
            command = [*self.before, sys.executable, "-m", "stepfs.csi", *words]
            return subprocess.Popen(command, stderr=log, stdout=log, env=self.environment)

    def _forked(self, words: list[str]) -> Served:
        log = self.directory / f"{words[0]}.log"
        return Served(forked.begun(_serve, words, self.environment, str(log)))

    def restart_plugin(self) -> None:
        self.plugin.kill()
        self.plugin.wait()
        self.channel.close()  # kubelet connects for each call
        self.plugin = self._start("plugin")
        self.channel = self._connected()

    def call(self, method: str, service: str = "Node", **fields: object):
        call = self.channel.unary_unary(
            f"/csi.v1.{service}/{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=MESSAGES[f"{method}Response"].FromString,
        )
        return call(MESSAGES[f"{method}Request"](**fields), timeout=PATIENCE_S, wait_for_ready=True)

    def publish(self, volume: str, target: Path, **fields: object):
        usual = {"volume_capability": READ_ONLY_MANY, "readonly": True}
        return self.call("NodePublishVolume", volume_id=volume, target_path=str(target), **(usual | fields))

    def unpublish(self, volume: str, target: Path):
        return self.call("NodeUnpublishVolume", volume_id=volume, target_path=str(target))

    def refused(self, code: grpc.StatusCode, words: str, method: str, **fields: object) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, **fields)
        assert (caught.value.code(), "\n" in caught.value.details()) == (code, False)
        assert words in caught.value.details()

    def end(self) -> None:
        for mounted in reversed(mount_table.mounts()):
            if mounted.directory.startswith(str(self.directory)):
                mount_points.unmount(Path(mounted.directory), lazy=True)
        self.channel.close()
        for process in (self.plugin, self.holder):
            process.kill()
            process.wait()


def mounted_below(directory: Path) -> list[str]:
    return sorted(one.directory for one in mount_table.mounts() if one.directory.startswith(str(directory)))


def daemon_of(target: Path) -> int:
    return int(json.loads((target / ".stepfs/status.json").read_text())["pid"])


def fires(stats) -> bool:
    """Whether rules that people have on volumes that fill up fire, of what kubelet makes of an answer without a field: 0."""
    (one,) = stats.usage  # kubelet calls it an error if there is none, and drops the condition

    def ratio(part: int) -> float:  # as Prometheus divides
        return part / one.total if one.total else math.nan if part == 0 else math.inf

    filling_up = ratio(one.available) < 0.03 and one.used > 0  # kubernetes-mixin: bytes, and inodes
    return filling_up or ratio(one.available) * 100 < 10 or ratio(one.used) > 0.85


def ended_with(node: Node, code: grpc.StatusCode, words: str, **fields: object) -> None:
    """A publish is refused, and leaves no mount."""
    usual = {"volume_id": "v", "target_path": str(node.directory / "target"), "volume_capability": READ_ONLY_MANY}
    node.refused(code, words, "NodePublishVolume", **(usual | fields))
    assert mounted_below(node.directory) == []
    assert not node.base.exists() or list(node.base.iterdir()) == []


def listing(directory: Path) -> list[str] | OSError:
    try:
        return os.listdir(directory)
    except OSError as error:
        return error


def shown(directory: Path) -> str:
    names = listing(directory)
    return errno.errorcode[names.errno or 0] if isinstance(names, OSError) else "steps" if names else "EMPTY"


def answer(node: Node, method: str, volume: str, target: Path, **fields: object) -> str:
    path = "volume_path" if method == "NodeGetVolumeStats" else "target_path"
    if method == "NodePublishVolume":
        fields = {"volume_capability": READ_ONLY_MANY, **fields}
    try:
        response = node.call(method, volume_id=volume, **{path: str(target)}, **fields)
    except grpc.RpcError as error:
        return error.code().name
    return "ABNORMAL" if method == "NodeGetVolumeStats" and response.volume_condition.abnormal else "OK"
