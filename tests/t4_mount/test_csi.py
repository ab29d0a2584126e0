"""The node plugin of Kubernetes: kubelet's calls by gRPC, with real mounts, and what survives the plugin."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import rawserver
import servers
from certificates import self_signed
from prometheus_client.parser import text_string_to_metric_families
from realmount import PATIENCE_S, lake_with, needs_resend, payload, until

from stepfs.csi.__main__ import parsed
from stepfs.csi.holder import ask
from stepfs.csi.messages import MESSAGES
from stepfs.mount.host import mount_points, mount_table

READ_ONLY_MANY = {"mount": {}, "access_mode": {"mode": 3}}


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

    def _start(self, role: str) -> subprocess.Popen[bytes]:
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
        with (self.directory / f"{role}.log").open("ab") as log:
            command = [
                *(self.before if role == "holder" else ()),
                sys.executable,
                "-m",
                "stepfs.csi",
                role,
                *map(str, words),
                *(self.more if role == "plugin" else ()),
            ]
            return subprocess.Popen(command, stderr=log, stdout=log, env=self.environment)

    def restart_plugin(self) -> None:
        self.plugin.send_signal(signal.SIGKILL)
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


@pytest.fixture
def other_node(tmp_path, monkeypatch):
    """A function that makes a node, which is ended with the test."""
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "log"))
    made = []

    def make(*before: str, **variables: str | None) -> Node:
        made.append(Node(tmp_path, *before, **variables))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def node(other_node):
    return other_node()


@pytest.fixture
def lake(file_url):
    lake_with(file_url, 2)
    return file_url


def mounted_below(directory: Path) -> list[str]:
    return sorted(one.directory for one in mount_table.mounts() if one.directory.startswith(str(directory)))


def daemon_of(target: Path) -> int:
    return int(json.loads((target / ".stepfs/status.json").read_text())["pid"])


def test_requests_are_read_as_the_specification_numbers_their_fields():
    """Bytes written by hand from csi.proto."""
    wire = bytes.fromhex("0a017622022f742a0612001a02080330013a060a016b12017642060a016c120175")
    request = MESSAGES["NodePublishVolumeRequest"].FromString(wire)
    assert (request.volume_id, request.target_path, request.readonly) == ("v", "/t", True)
    assert (dict(request.secrets), dict(request.volume_context)) == ({"k": "v"}, {"l": "u"})
    assert request.volume_capability.HasField("mount")
    assert request.volume_capability.access_mode.mode == 3
    response = MESSAGES["NodeGetVolumeStatsResponse"](
        usage=[{"total": 5, "used": 5, "unit": 1}], volume_condition={"abnormal": True}
    )
    assert response.SerializeToString().hex() == "0a0610051805200112020801"
    capability = MESSAGES["NodeGetCapabilitiesResponse"](capabilities=[{"rpc": {"type": 2}}])
    assert capability.SerializeToString().hex() == "0a040a020802"


def fires(stats) -> bool:
    """Whether rules that people have on volumes that fill up fire, of what kubelet makes of an answer without a field: 0."""
    (one,) = stats.usage  # kubelet calls it an error if there is none, and drops the condition

    def ratio(part: int) -> float:  # as Prometheus divides
        return part / one.total if one.total else math.nan if part == 0 else math.inf

    filling_up = ratio(one.available) < 0.03 and one.used > 0  # kubernetes-mixin: bytes, and inodes
    return filling_up or ratio(one.available) * 100 < 10 or ratio(one.used) > 0.85


def test_a_volume_from_publish_to_unpublish(node, lake, tmp_path):
    assert node.call("GetPluginInfo", "Identity").name == "stepfs.csi"
    assert node.call("Probe", "Identity").ready.value is True
    assert node.call("NodeGetInfo").node_id == "n1"
    assert {one.rpc.type for one in node.call("NodeGetCapabilities").capabilities} == {2, 4}
    one, other = tmp_path / "pods/a b/mount", tmp_path / "pods/2/mount"
    attributes = {"lake": lake, "group": "run", "ranks": "0", "csi.storage.k8s.io/pod.name": "trainer-0"}
    for target in (one, other, one):  # twice is once
        node.publish("v1", target, volume_context=attributes, readonly=False)  # of the pod: the volume is
        assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
    assert len(mounted_below(node.base)) == 1, "one daemon for both pods"
    with pytest.raises(OSError, match="Read-only") as caught:
        os.open(one / "new", os.O_WRONLY | os.O_CREAT)
    assert caught.value.errno == errno.EROFS
    stats = node.call("NodeGetVolumeStats", volume_id="v1", volume_path=str(one))
    assert stats.volume_condition.abnormal is False
    assert not fires(stats)
    node.unpublish("v1", one)
    assert not one.exists()
    assert (other / "step-000000001/rank-00001.bin").read_bytes() == payload(1, 1)
    node.unpublish("v1", other)
    node.unpublish("v1", other)  # of what is not there
    assert mounted_below(tmp_path) == []
    assert list(node.base.iterdir()) == []


def test_readers_do_not_see_that_the_plugin_is_killed(node, lake, tmp_path):
    target = tmp_path / "pod/mount"
    node.publish("v1", target, volume_context={"lake": lake})
    with (target / "step-000000000/rank-00000.bin").open("rb") as held:
        node.restart_plugin()
        assert held.read() == payload(0, 0)
        node.publish("v1", target, volume_context={"lake": lake})  # kubelet asks again
    node.unpublish("v1", target)
    assert mounted_below(tmp_path) == []


class Reader(threading.Thread):
    """Reads every file of a lake of two steps again and again, each opened anew and one that is held."""

    def __init__(self, target: Path) -> None:
        super().__init__(daemon=True)
        self.target, self.ended, self.rounds, self.trouble = target, threading.Event(), 0, ""
        self.start()

    def run(self) -> None:
        try:
            with (self.target / "step-000000000/rank-00000.bin").open("rb", buffering=0) as held:
                while not self.ended.is_set():
                    for step, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
                        descriptor = os.open(
                            self.target / f"step-{step:09d}/rank-{rank:05d}.bin", os.O_RDONLY | os.O_DIRECT
                        )
                        with os.fdopen(descriptor, "rb") as file:
                            assert file.read() == payload(step, rank)
                    held.seek(0)
                    assert held.read() == payload(0, 0)
                    assert len(os.listdir(self.target)) == 3
                    self.rounds += 1
        except (OSError, AssertionError) as error:
            self.trouble = repr(error)

    def goes_on(self) -> None:
        rounds = self.rounds
        until(lambda: bool(self.trouble) or self.rounds > rounds + 2, "the reader goes on")
        assert not self.trouble


@needs_resend
def test_readers_do_not_see_that_the_daemon_of_a_volume_is_killed(node, lake, tmp_path):
    killed, other = tmp_path / "pod/killed", tmp_path / "pod/other"
    for volume, target in (("v1", killed), ("v2", other)):
        node.publish(volume, target, volume_context={"lake": lake})
    readers = [Reader(killed), Reader(other)]
    for reader in readers:
        reader.goes_on()
    before, untouched = daemon_of(killed), daemon_of(other)
    os.kill(before, signal.SIGKILL)
    for reader in readers:
        reader.goes_on()
    assert (daemon_of(killed) != before, daemon_of(other)) == (True, untouched)
    node.publish("v1", killed, volume_context={"lake": lake})  # kubelet asks again: it is the same mount
    assert node.call("NodeGetVolumeStats", volume_id="v1", volume_path=str(killed)).volume_condition.abnormal is False
    for reader in readers:
        reader.goes_on()
        reader.ended.set()
        reader.join()
    for volume, target in (("v1", killed), ("v2", other)):
        node.unpublish(volume, target)
    assert mounted_below(tmp_path) == []


def ended_with(node: Node, code: grpc.StatusCode, words: str, **fields: object) -> None:
    """A publish is refused, and leaves no mount."""
    usual = {"volume_id": "v", "target_path": str(node.directory / "target"), "volume_capability": READ_ONLY_MANY}
    node.refused(code, words, "NodePublishVolume", **(usual | fields))
    assert mounted_below(node.directory) == []
    assert not node.base.exists() or list(node.base.iterdir()) == []


def test_a_secret_that_is_absent_or_of_no_use_is_told(other_node, s3_url, tmp_path):
    lake_with(s3_url, 2)
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    absent = {
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    node = other_node(**dict.fromkeys(keys), **absent)
    context = {"lake": s3_url}
    ended_with(node, grpc.StatusCode.FAILED_PRECONDITION, "AWS_ACCESS_KEY_ID", volume_context=context)
    wrong = keys | {"AWS_SECRET_ACCESS_KEY": "expired"}
    ended_with(
        node, grpc.StatusCode.FAILED_PRECONDITION, "AWS_SECRET_ACCESS_KEY", volume_context=context, secrets=wrong
    )
    node.publish("v", tmp_path / "target", volume_context=context, secrets={n: f"{key}\n" for n, key in keys.items()})
    assert (tmp_path / "target/step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)


def test_a_socket_may_be_named_by_its_url_and_is_absolute(capsys):
    given = parsed(["plugin", "--endpoint", "unix:///run/a.sock", "--holder", "/run/b.sock"])
    assert (given.endpoint, given.holder) == ("/run/a.sock", "/run/b.sock")
    for wrong in ("a.sock", "tcp://0.0.0.0:1"):
        with pytest.raises(SystemExit) as ended:
            parsed(["holder", "--holder", wrong])
        assert ended.value.code == 2
        assert f"{wrong!r} is no absolute path; write one such as /csi/csi.sock" in capsys.readouterr().err


def test_an_attribute_that_is_given_twice_is_the_later_one():
    """As protobuf has it; kubectl refuses such a volume before."""
    wire = bytes.fromhex("42060a016c120175" * 2 + "42060a016c120177")
    assert dict(MESSAGES["NodePublishVolumeRequest"].FromString(wire).volume_context) == {"l": "w"}


def test_a_node_without_the_device_says_so(other_node, lake):
    hidden = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && exec "$@"'
    node = other_node("unshare", "--mount", "sh", "-c", hidden, "sh")
    ended_with(
        node, grpc.StatusCode.FAILED_PRECONDITION, "give the container the device", volume_context={"lake": lake}
    )


def test_an_image_without_the_extra_names_it(other_node, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without/obstore.py").write_text("raise ModuleNotFoundError('no obstore', name='obstore')\n")
    node = other_node(PYTHONPATH=str(tmp_path / "without"))
    context = {"lake": "gs://bucket/run"}
    ended_with(node, grpc.StatusCode.INVALID_ARGUMENT, "pip install 'stepfs[gcs]'", volume_context=context)


def test_a_volume_whose_holder_died_is_served_again_at_the_next_publish(node, lake, tmp_path):
    target = tmp_path / "pod/mount"
    node.publish("v1", target, volume_context={"lake": lake})
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    daemons = [
        pid for pid in processes if str(node.base) in _command_line(pid) and "stepfs.mount" in _command_line(pid)
    ]
    node.holder.kill()
    node.holder.wait()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once, as at the end of a container
        for pid in daemons:
            os.kill(pid, number)
    until(lambda: isinstance(_listing(target), OSError), "the mount is dead")
    stats = node.call("NodeGetVolumeStats", volume_id="v1", volume_path=str(target))
    assert (stats.volume_condition.abnormal, len(stats.usage)) == (True, 1)
    fields = {"volume_id": "v1", "target_path": str(target), "volume_capability": READ_ONLY_MANY}
    node.refused(
        grpc.StatusCode.UNAVAILABLE,
        "is its container up?",
        "NodePublishVolume",
        volume_context={"lake": lake},
        **fields,
    )
    node.holder = node._start("holder")
    began = time.monotonic()
    while True:
        try:
            node.publish("v1", target, volume_context={"lake": lake})
            break
        except grpc.RpcError:
            assert time.monotonic() - began < PATIENCE_S
            time.sleep(0.1)
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)


def test_what_cannot_be_published_is_told_in_one_line(node, lake, tmp_path):
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    target, full = tmp_path / "target", tmp_path / "full"
    (full / "inside").mkdir(parents=True)
    fields = {
        "volume_id": "v", "target_path": str(target), "volume_capability": READ_ONLY_MANY, "volume_context": {"lake": lake},
    }  # fmt: skip
    for change, code, words in [
        ({"volume_context": {}}, invalid, "lake is missing"),
        (
            {"volume_context": {"lake": lake, "rank": "0"}},
            invalid,
            "unknown volumeAttributes: rank; known are lake, ranks",
        ),
        ({"volume_context": {"lake": lake, "ranks": "7"}}, invalid, "no rank 7"),
        ({"volume_context": {"lake": f"{lake}-none"}}, grpc.StatusCode.NOT_FOUND, "is not a lake"),
        ({"volume_context": {"lake": lake, "show-last": "0"}}, invalid, "--show-last"),
        ({"volume_context": {"lake": lake, "prime": "no"}}, invalid, """prime is "true" or "false", not 'no'"""),
        ({"volume_context": {"lake": lake, "cache-dir": "here"}}, invalid, "cache-dir is 'here'; name a directory"),
        ({"volume_context": {"lake": lake, "cache-size": "lots"}}, invalid, "for example 8G"),
        (
            {"volume_context": {"lake": lake, "checkpoint-dir": "/ckpt"}},
            invalid,
            "unknown volumeAttributes: checkpoint-dir",
        ),
        ({"volume_context": {"lake": f"--near={lake}"}}, invalid, "--near"),
        ({"volume_capability": {"block": {}, "access_mode": {"mode": 3}}}, invalid, "volumeMode Filesystem"),
        ({"volume_capability": READ_ONLY_MANY | {"mount": {"mount_flags": ["ro"]}}}, invalid, "mountOptions ro"),
        ({"volume_capability": READ_ONLY_MANY | {"mount": {"fs_type": "ext4"}}}, invalid, "fsType ext4: leave it out"),
        *(
            (
                {"volume_capability": {"mount": {}, "access_mode": {"mode": mode}}},
                invalid,
                f"accessModes {name}: a lake is",
            )
            for mode, name in [(0, "unknown"), (1, "ReadWriteOnce"), (5, "ReadWriteMany"), (6, "ReadWriteOncePod")]
        ),
        ({"target_path": f"{target}\0"}, invalid, "an absolute target_path"),
        ({"secrets": {"LD_PRELOAD": "x"}}, invalid, "the secret has the keys LD_PRELOAD"),
        ({"target_path": "relative"}, invalid, "an absolute target_path"),
        ({"volume_id": ""}, invalid, "volume_id"),
        ({"target_path": str(full)}, grpc.StatusCode.FAILED_PRECONDITION, "is not empty"),
        ({"target_path": "/proc"}, grpc.StatusCode.ALREADY_EXISTS, "/proc is a mount of proc"),
    ]:
        node.refused(code, words, "NodePublishVolume", **(fields | change))
    node.publish("v", target, volume_context={"lake": lake})
    node.refused(
        grpc.StatusCode.FAILED_PRECONDITION, "a volumeHandle of its own", "NodePublishVolume",
        **(fields | {"target_path": str(tmp_path / "b"), "volume_context": {"lake": lake, "ranks": "1"}}),
    )  # fmt: skip
    node.publish("w", tmp_path / "w", volume_context={"lake": lake})
    node.refused(
        grpc.StatusCode.ALREADY_EXISTS, "has another volume", "NodePublishVolume", **(fields | {"volume_id": "w"})
    )
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
    stats = {"volume_id": "v", "volume_path": str(tmp_path / "none")}
    node.refused(grpc.StatusCode.NOT_FOUND, "is not at", "NodeGetVolumeStats", **stats)
    node.refused(grpc.StatusCode.NOT_FOUND, "is not at", "NodeGetVolumeStats", volume_id="v", volume_path=str(full))
    node.refused(
        grpc.StatusCode.FAILED_PRECONDITION,
        "a mount of proc",
        "NodeUnpublishVolume",
        volume_id="v",
        target_path="/proc",
    )


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _listing(directory: Path) -> list[str] | OSError:
    try:
        return os.listdir(directory)
    except OSError as error:
        return error


def test_attributes_are_options_of_mount(node, lake, tmp_path):
    given = {
        "cache-dir": str(tmp_path / "cache"), "cache-size": "64M", "near": f"file://{tmp_path}/near", "prefetch": "3", "prime": "false",
        "recover": "true", "list-latest": "false", "memory-size": "64M",
    }  # fmt: skip
    node.publish("v", tmp_path / "target", volume_context={"lake": lake} | given)
    options = json.loads((tmp_path / "target/.stepfs/config.json").read_text())
    shown = {
        name: options["options"][name] for name in ("cache_bytes", "near", "prefetch_steps", "prime", "list_latest")
    }
    assert shown == {
        "cache_bytes": 64 << 20, "near": f"file://{tmp_path}/near", "prefetch_steps": 3, "prime": False, "list_latest": False
    }  # fmt: skip
    assert list((tmp_path / "cache").iterdir()) != []


def test_the_plugin_serves_the_metrics_of_all_volumes(node, lake, tmp_path):
    free_port = servers.free_port_of_nobody()
    node.more = [f"--metrics-port={free_port}", "--metrics-address=127.0.0.1"]
    node.restart_plugin()
    for volume in ("v1", "v2"):
        node.publish(volume, tmp_path / volume, volume_context={"lake": lake, "recover": "false"})

    def scraped() -> dict[str, dict[str, float]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=PATIENCE_S) as answer:
            found = text_string_to_metric_families(answer.read().decode())
        return {family.name: {sample.labels["instance"]: sample.value for sample in family.samples} for family in found}

    metrics = scraped()
    assert metrics["stepfs_frontier_step"] == {"n1/v1": 1, "n1/v2": 1}
    assert set(metrics["stepfs_fetch_seconds"]) == set(metrics["process_resident_memory_bytes"]) == {"n1/v1", "n1/v2"}
    os.kill(daemon_of(tmp_path / "v1"), signal.SIGKILL)
    until(lambda: set(scraped()["stepfs_frontier_step"]) == {"n1/v2"}, "a dead mount has no metrics")


def test_the_holder_logs_what_it_is_asked_for(other_node, lake, tmp_path):
    node = other_node(STEPFS_LOG_FORMAT="json")
    node.publish("v", tmp_path / "target", volume_context={"lake": lake})
    node.unpublish("v", tmp_path / "target")
    ended_with(node, grpc.StatusCode.NOT_FOUND, "is not a lake", volume_context={"lake": f"{lake}-none"})
    lines = [json.loads(line) for line in (tmp_path / "holder.log").read_text().splitlines()]
    assert {line["logger"] for line in lines} == {"stepfs.csi.holder"}
    assert lines[0]["message"] == f"starts the daemons of volumes, as {tmp_path}/holder.sock asks"
    told = [(line["level"], line["message"].partition(" ")[0], line["message"]) for line in lines[1:]]
    assert [(level, verb) for level, verb, _ in told] == [
        ("INFO", "mount"), ("INFO", "mount"), ("INFO", "unmount"), ("INFO", "unmount"), ("INFO", "mount"), ("WARNING", "mount"),
    ]  # fmt: skip
    assert told[0][2].endswith(": begins")
    assert ": done after" in told[1][2]
    assert "exit code 3 after" in told[-1][2]
    assert "is not a lake" in told[-1][2]
    log = json.loads((tmp_path / "plugin.log").read_text().splitlines()[1])["message"].rpartition(" ")[2]
    assert (tmp_path / "log" / log).exists()


def test_a_daemon_that_is_silent_keeps_its_pods(node, lake, tmp_path):
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": lake})
    daemon = daemon_of(target)
    os.kill(daemon, signal.SIGSTOP)
    try:
        fields = {"volume_id": "v", "target_path": str(target), "volume_capability": READ_ONLY_MANY}
        silent = (grpc.StatusCode.UNAVAILABLE, "does not answer now", "NodePublishVolume")
        node.refused(*silent, volume_context={"lake": lake}, **fields)
        stats = node.call("NodeGetVolumeStats", volume_id="v", volume_path=str(target))
        assert (stats.volume_condition.abnormal, fires(stats)) == (True, False)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)
    assert daemon_of(target) == daemon


def test_a_request_in_the_middle_of_another_is_told_and_one_that_was_given_up_leaves_nothing(node, lake, tmp_path):
    target = tmp_path / "target"
    os.kill(node.holder.pid, signal.SIGSTOP)
    call = node.channel.unary_unary(
        "/csi.v1.Node/NodePublishVolume",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=MESSAGES["NodePublishVolumeResponse"].FromString,
    )
    request = MESSAGES["NodePublishVolumeRequest"](
        volume_id="v", target_path=str(target), volume_capability=READ_ONLY_MANY, volume_context={"lake": lake}
    )
    given_up = call.future(request, timeout=PATIENCE_S)
    until(lambda: list(node.base.glob("*/volume.json")) != [], "the publish is under way")
    given_up.cancel()  # as kubelet does after two minutes
    node.refused(grpc.StatusCode.ABORTED, "is not done", "NodeUnpublishVolume", volume_id="v", target_path=str(target))
    assert node.call("Probe", "Identity").ready.value is True
    os.kill(node.holder.pid, signal.SIGCONT)
    until(lambda: mount_table.mount_at(target) is not None, "what kubelet has given up is published")
    node.unpublish("v", target)
    assert (mounted_below(tmp_path), list(node.base.iterdir())) == ([], [])


def test_a_volume_behind_a_link_with_a_strange_name(node, lake, tmp_path):
    """kubelet's directory may be a link; a volumeHandle may be any text."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "kubelet").symlink_to("disk")
    volume, target = "a/../b\n\u2603 " * 200, tmp_path / "kubelet/pods/1/mount"
    for _ in range(2):
        node.publish(volume, target, volume_context={"lake": lake})
    assert len(mounted_below(tmp_path / "disk")) == 1
    node.call("NodeGetVolumeStats", volume_id=volume, volume_path=str(target))
    node.publish(volume, target, volume_context={"lake": lake, "group": "g"})
    assert "stays as it is: group is None, not 'g'" in (tmp_path / "plugin.log").read_text()
    node.unpublish(volume, target)
    assert (mounted_below(tmp_path), list(node.base.iterdir())) == ([], [])


def test_what_nobody_uses_any_more_ends_with_the_next_unpublish(node, lake, tmp_path):
    """A reader that outlived its pod; a daemon that came after the pod had gone; a directory from before a reboot."""
    target = tmp_path / "target"
    node.publish("read", target, volume_context={"lake": lake})
    with (target / "step-000000000/rank-00000.bin").open("rb") as held:
        node.unpublish("read", target)
        assert mounted_below(target) == []
        assert held.read() == payload(0, 0)
    for name in ("late", "rebooted"):
        (node.base / name / "mnt").mkdir(parents=True)
        (node.base / name / "volume.json").write_text(json.dumps({"volume": name, "arguments": []}))
    assert ask(tmp_path / "holder.sock", ["mount", lake, str(node.base / "late/mnt")], {})[0] == 0
    assert len(mounted_below(node.base)) == 2
    target.mkdir()  # kubelet cleans up after a reboot
    node.unpublish("other", target)
    assert (mounted_below(tmp_path), list(node.base.iterdir()), target.exists()) == ([], [], False)


def test_attributes_from_before_a_reboot_do_not_count(node, lake, tmp_path):
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": lake})
    (state,) = node.base.glob("*/volume.json")
    text = state.read_text().replace(lake, "s3://gone/run")
    node.unpublish("v", target)
    (state.parent / "mnt").mkdir(parents=True)
    state.write_text(text)
    node.publish("v", target, volume_context={"lake": lake})
    assert (target / "step-000000001/rank-00000.bin").read_bytes() == payload(1, 0)


def test_a_secret_runs_no_program_and_opens_no_file(other_node, tmp_path):
    """Whoever may write a Secret of a namespace is no root of the node."""
    ran, token = tmp_path / "ran", tmp_path / "token"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = touch {ran}\n")
    token.write_text("of the driver")
    node = other_node(AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_EC2_METADATA_DISABLED="true")
    with rawserver.raw_server() as server:
        url = server.endpoint_url
        for secret in (
            {"AWS_CONFIG_FILE": str(tmp_path / "config")},
            {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_ENDPOINT_URL_STS": url},
            {"AWS_ENDPOINT_URL_S3": url},
        ):  # fmt: skip
            context = {"lake": "s3://bucket/run", "endpoint-url": url}
            names = "the secret has " + ("the keys " if len(secret) > 1 or "AWS_CONFIG_FILE" in secret else "")
            ended_with(node, grpc.StatusCode.INVALID_ARGUMENT, names, volume_context=context, secrets=secret)
        assert server.requests == []
    assert not ran.exists()


OF_OTHER_TESTS = "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"


def test_a_volume_with_keys_has_nothing_of_the_drivers_own_role(other_node, s3_url, tmp_path):
    """And an authority comes as a text: the driver keeps it where nobody else reads."""
    lake_with(s3_url, 2)
    usual = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3")
    keys = {name: os.environ[name] for name in usual[:2]} | {"AWS_ENDPOINT_URL": os.environ[usual[2]]}
    pem = self_signed(tmp_path).public.read_text()
    role = {
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_PROFILE": "driver", "AWS_SESSION_TOKEN": "t",
        "GOOGLE_APPLICATION_CREDENTIALS": "/g", "AZURE_FEDERATED_TOKEN_FILE": "/a", "AWS_RETRY_MODE": "standard",
    }  # fmt: skip
    node = other_node(**dict.fromkeys((*usual, *OF_OTHER_TESTS)), **role)
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": s3_url}, secrets=keys | {"AWS_CA_BUNDLE": pem})
    variables = Path(f"/proc/{daemon_of(target)}/environ").read_text().split("\0")
    found = dict(line.split("=", 1) for line in variables if line.startswith(("AWS_", "GOOGLE_", "AZURE_")))
    (kept,) = node.base.glob("*/ca.pem")
    assert found == {
        **{name: keys[name] for name in usual[:2]}, "AWS_ENDPOINT_URL_S3": keys["AWS_ENDPOINT_URL"],
        "AWS_CA_BUNDLE": str(kept), "AWS_RETRY_MODE": "standard",
    }  # fmt: skip
    assert (kept.read_text().strip(), kept.stat().st_mode & 0o777) == (pem.strip(), 0o600)
    assert node.base.stat().st_mode & 0o777 == 0o700
    node.unpublish("v", target)
    assert list(node.base.iterdir()) == []


class Looker(threading.Thread):
    """Lists a directory all the time, as a container may that starts just now, and notes each thing that it sees."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory, self.ended, self.seen = directory, threading.Event(), set[str]()
        self.start()

    def run(self) -> None:
        while not self.ended.is_set():
            self.seen.add(shown(self.directory))

    def end(self) -> set[str]:
        self.ended.set()
        self.join()
        return self.seen


def shown(directory: Path) -> str:
    names = _listing(directory)
    return errno.errorcode[names.errno or 0] if isinstance(names, OSError) else "steps" if names else "EMPTY"


def killed(target: Path) -> None:
    """The daemon of a volume with `recover: "false"`."""
    os.kill(daemon_of(target), signal.SIGKILL)
    until(lambda: shown(target) == "ENOTCONN", "the mount is dead")


def answer(node: Node, method: str, volume: str, target: Path, **fields: object) -> str:
    path = "volume_path" if method == "NodeGetVolumeStats" else "target_path"
    if method == "NodePublishVolume":
        fields = {"volume_capability": READ_ONLY_MANY, **fields}
    try:
        response = node.call(method, volume_id=volume, **{path: str(target)}, **fields)
    except grpc.RpcError as error:
        return error.code().name
    return "ABNORMAL" if method == "NodeGetVolumeStats" and response.volume_condition.abnormal else "OK"


# State of the target → what publish, stats and unpublish answer, and what the target shows after publish. Kubelet takes
# every error but UNAVAILABLE and ABORTED as final, and forgets a volume that it had published.
WELL, LATER = ("OK", "steps", "OK", "OK"), ("UNAVAILABLE", "ENOTCONN", "ABNORMAL", "OK")
STATES = {
    "alive, another secret": WELL,
    "dead": WELL,
    "dead, its other pod was served again with other attributes": WELL,
    "dead, no holder": LATER,
    "dead, the lake is gone": LATER,
    "another volume": ("ALREADY_EXISTS", "steps", "NOT_FOUND", "FAILED_PRECONDITION"),
    "a foreign mount": ("ALREADY_EXISTS", "EMPTY", "NOT_FOUND", "FAILED_PRECONDITION"),
    "never published, no holder": ("UNAVAILABLE", "EMPTY", "NOT_FOUND", "OK"),
}
MORE_STATES = {
    "never published": WELL,
    "alive": WELL,
    "alive, other attributes": WELL,
    "alive, the lake is gone": WELL,
    "alive, no holder": WELL,
    "dead twice": WELL,
    "dead, other attributes": WELL,
    "dead, another secret": LATER,
    "dead, unknown attributes": LATER,
    "dead, the lake is damaged": LATER,
    "another volume, dead": ("ALREADY_EXISTS", "ENOTCONN", "NOT_FOUND", "FAILED_PRECONDITION"),
    "never published, the lake is gone": ("NOT_FOUND", "EMPTY", "NOT_FOUND", "OK"),
    "never published, another secret": ("INVALID_ARGUMENT", "EMPTY", "NOT_FOUND", "OK"),
}


def brought(state: str, node: Node, lake: str, target: Path, other: Path) -> dict[str, object]:
    """What kubelet publishes at `target`, which has come into this state."""
    fields: dict[str, object] = {"volume_context": {"lake": lake, "recover": "false"}}
    changed = {"volume_context": {"lake": lake, "rank" if "unknown" in state else "ranks": "1"}}
    if state == "a foreign mount":
        target.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", str(target)], check=True)
    elif "never" not in state:
        node.publish("w" if "another volume" in state else "v", target, **fields)
    if "its other pod" in state:
        node.publish("v", other, **fields)
    for _ in range(2 if "twice" in state else "dead" in state):
        if shown(target) == "ENOTCONN":
            node.publish("v", target, **fields)
        killed(target)
    if "its other pod" in state:
        node.publish("v", other, **changed)
    elif "attributes" in state:
        fields = changed
    return fields | ({"secrets": {"username": "somebody"}} if "secret" in state else {})


def spoil(state: str, node: Node, directory: Path) -> None:
    """What is gone around the node."""
    if "lake is" in state:
        (directory / "lake.msgpack").rename(directory / "before")
    if "damaged" in state:
        (directory / "lake.msgpack").write_bytes(b"rotten")
    if "no holder" in state:
        node.holder.kill()
        node.holder.wait()


@pytest.mark.parametrize("state", [*STATES, *(pytest.param(one, marks=pytest.mark.nightly) for one in MORE_STATES)])
def test_each_call_in_every_state(state, node, lake, tmp_path):
    target, other = tmp_path / "pod/mount", tmp_path / "pod2/mount"
    fields = brought(state, node, lake, target, other)
    spoil(state, node, tmp_path / "lake")
    publish, shows, stats, unpublish = (STATES | MORE_STATES)[state]
    looker = Looker(target)
    for _ in range(2):
        assert (answer(node, "NodePublishVolume", "v", target, **fields), shown(target)) == (publish, shows)
    assert answer(node, "NodeGetVolumeStats", "v", target) == stats
    empty = "EMPTY" in looker.end()
    assert not empty or shows == "EMPTY" or "never" in state, "a container that starts meanwhile has no steps for good"
    for _ in range(2):
        assert answer(node, "NodeUnpublishVolume", "v", target) == unpublish
    assert target.exists() == (unpublish != "OK")
    if unpublish == "OK" and "no holder" not in state:
        node.unpublish("v", other)
        assert mounted_below(node.base) == []


def test_a_container_that_follows_the_hosts_mounts_is_served_again_without_a_restart(node, lake, tmp_path):
    """As with mountPropagation: HostToContainer. And a target that dies again and again has two mounts at most."""
    pods, target = tmp_path / "pods", tmp_path / "pods/1/mount"
    pods.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(pods)], check=True)
    subprocess.run(["mount", "--make-shared", str(pods)], check=True)
    fields = {"volume_context": {"lake": lake, "recover": "false"}}
    node.publish("v", target, **fields)
    data = tmp_path / "data"
    data.mkdir()
    follows = 'mount --bind "$0" "$1" && mount --make-rslave "$1" && echo begun && exec sleep infinity'
    command = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", follows, str(target), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "begun\n"
        inside = Path(f"/proc/{container.pid}/root{data}")
        for _ in range(3):
            killed(target)
            assert shown(inside) == "ENOTCONN"
            node.publish("v", target, **fields)
            assert (shown(target), shown(inside), mounted_below(target)) == ("steps", "steps", [str(target)] * 2)
        container.kill()
    node.unpublish("v", target)
    assert mounted_below(tmp_path) == [str(pods)]


def hanging_threads(pid: int) -> int:
    """Those that wait for a file system."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found += any(word in (task / "wchan").read_text() for word in ("fuse", "request_wait"))
    return found


def test_a_silent_mount_costs_the_plugin_one_thread(node, lake, tmp_path):
    free_port, target = servers.free_port_of_nobody(), tmp_path / "target"
    node.more = [f"--metrics-port={free_port}", "--metrics-address=127.0.0.1"]
    node.restart_plugin()
    node.publish("v", target, volume_context={"lake": lake})
    daemon = daemon_of(target)
    os.kill(daemon, signal.SIGSTOP)
    try:
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=PATIENCE_S) as answered:
                assert answered.read() == b""
        assert answer(node, "NodeGetVolumeStats", "v", target) == "ABNORMAL"
        assert answer(node, "NodePublishVolume", "v", target, volume_context={"lake": lake}) == "UNAVAILABLE"
        assert hanging_threads(node.plugin.pid) == 1
    finally:
        os.kill(daemon, signal.SIGCONT)
    until(lambda: answer(node, "NodeGetVolumeStats", "v", target) == "OK", "it answers again")


def test_a_holder_that_is_gone_is_not_ready_and_one_that_cannot_start_a_mount_says_why(node, lake, tmp_path):
    invalid, context = grpc.StatusCode.INVALID_ARGUMENT, {"lake": lake}
    ended_with(node, invalid, "is too long or has a NUL", volume_context=context | {"group": "g" * 200_000})
    ended_with(node, invalid, "is too long or has a NUL", volume_context=context | {"group": "a\0b"})
    ended_with(node, invalid, "is too long or has a NUL", volume_context=context, secrets={"AWS_REGION": "a\0b"})
    assert node.call("Probe", "Identity").ready.value is True
    assert "not a request" not in (tmp_path / "holder.log").read_text()
    node.holder.kill()
    node.holder.wait()
    assert node.call("Probe", "Identity").ready.value is False


def test_statistics_of_what_is_no_volume_or_no_path(node, lake, tmp_path):
    target = tmp_path / "target"
    node.publish("v", target, volume_context={"lake": lake})
    for volume, path, code in [
        ("v", "some/path", grpc.StatusCode.NOT_FOUND), ("v", f"{target}/..", grpc.StatusCode.NOT_FOUND), ("v", "a\0b", grpc.StatusCode.NOT_FOUND),
        ("w", str(target), grpc.StatusCode.NOT_FOUND), ("w", "some/path", grpc.StatusCode.NOT_FOUND),
        ("", str(target), grpc.StatusCode.INVALID_ARGUMENT), ("v", "", grpc.StatusCode.INVALID_ARGUMENT),
    ]:  # fmt: skip
        node.refused(code, "volume", "NodeGetVolumeStats", volume_id=volume, volume_path=path)
