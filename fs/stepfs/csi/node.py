"""What a node does with volumes: one daemon a volume, made by the holder, and a bind mount of it at each target path.

All state is in the mount table and beside the mounts, so a plugin that is started again knows what the last one knew.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from stepfs.control_files import answer_within
from stepfs.csi.holder import ask
from stepfs.csi.messages import BYTES, MESSAGES
from stepfs.mount.host.mount_points import Mounted, mount_at, mounts, unmount

_log = logging.getLogger("stepfs.csi")

ATTRIBUTES: Final = ("lake", "ranks", "group", "steps", "wait", "mesh")
_OF_KUBERNETES: Final = "csi.storage.k8s.io/"  # facts about the pod, where the driver's object asks for them
_SECRET: Final = re.compile(r"(AWS|GOOGLE|AZURE)_[A-Z0-9_]+|STEPFS_SSE(_KMS_KEY_ID)?")
_CODES: Final = {  # of the exit codes of `stepfs mount`
    2: grpc.StatusCode.INVALID_ARGUMENT,
    3: grpc.StatusCode.NOT_FOUND,
    4: grpc.StatusCode.FAILED_PRECONDITION,
    5: grpc.StatusCode.DATA_LOSS,
    6: grpc.StatusCode.UNAVAILABLE,
}
_MS_BIND: Final = 4096


class RpcError(Exception):
    """A request ends with this status, and one line for `kubectl describe pod`."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _invalid(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message)


@dataclass(slots=True)
class Volumes:
    """The volumes of this node. `base` is seen by holder and plugin at one path, with its mounts."""

    base: Path
    holder: Path  # its socket
    _locks: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def publish(self, request: Any) -> Any:
        """Make the volume appear at the target path; again at any time, also to repair one whose daemon has died."""
        volume, target = _checked(request)
        arguments = _arguments(request.volume_context)
        environment = _environment(request.secrets)
        with self._locks[volume]:
            directory = self._directory(volume)
            there = mount_at(target)
            if there is not None:
                source = mount_at(directory / "mnt")
                if source is not None and there.device == source.device and _answers(target):
                    self._check_same(directory, volume, arguments, grpc.StatusCode.ALREADY_EXISTS)
                    return MESSAGES["NodePublishVolumeResponse"]()
                if there.fstype != "fuse.stepfs":
                    raise RpcError(
                        grpc.StatusCode.ALREADY_EXISTS, f"{target} is a mount of {there.fstype}; unmount it first"
                    )
                unmount(target, lazy=True)  # its daemon is dead
            _make_target(target)
            self._serve(directory, volume, arguments, environment)
            _bind(directory / "mnt", target)
        _log.info("volume %s is at %s", volume, target)
        return MESSAGES["NodePublishVolumeResponse"]()

    def unpublish(self, request: Any) -> Any:
        """Take the volume from the target path, and end its daemon with the last one. What is not there is no error."""
        volume, target = _named(request)
        with self._locks[volume]:
            there = mount_at(target)
            if there is not None:
                _unbind(target, there)
            if target.is_dir() and not target.is_symlink():
                try:
                    target.rmdir()
                except OSError as error:
                    _log.warning("%s stays: %s", target, error.strerror)
            self._end_unused(volume)
        return MESSAGES["NodeUnpublishVolumeResponse"]()

    def stats(self, request: Any) -> Any:
        """Bytes of the lake's steps, and whether the mount answers."""
        path = Path(request.volume_path)
        if not request.volume_id or not path.is_absolute():
            raise _invalid("volume_id and an absolute volume_path are required")
        there = mount_at(path)
        if there is None or there.fstype != "fuse.stepfs":
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"volume {request.volume_id} is not at {path}")
        found = answer_within(lambda: os.statvfs(path))
        response = MESSAGES["NodeGetVolumeStatsResponse"]()
        if isinstance(found, os.statvfs_result):
            total = found.f_blocks * found.f_frsize
            response.usage.add(total=total, used=total, available=0, unit=BYTES)
            response.volume_condition.message = "the mount answers"
        else:
            response.volume_condition.abnormal = True
            response.volume_condition.message = (
                f"the mount at {path} does not answer" if found is None else f"{path}: {found.strerror}"
            )
        return response

    def _directory(self, volume: str) -> Path:
        return self.base / hashlib.sha256(volume.encode()).hexdigest()[:16]

    def _serve(self, directory: Path, volume: str, arguments: list[str], environment: dict[str, str]) -> None:
        """Have a daemon serve the volume at `mnt` of its directory."""
        mount = directory / "mnt"
        if mount_at(mount) is not None and _answers(mount):
            self._check_same(directory, volume, arguments, grpc.StatusCode.FAILED_PRECONDITION)
            return
        try:
            mount.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in {errno.ENOTCONN, errno.EEXIST}:  # a dead mount lies there; mounting clears it
                raise
        (directory / "volume.json").write_text(json.dumps({"volume": volume, "arguments": arguments}))
        lake, *options = arguments
        self._command(["mount", lake, str(mount), *options, "--allow-other"], environment)

    def _check_same(self, directory: Path, volume: str, arguments: list[str], code: grpc.StatusCode) -> None:
        known = json.loads((directory / "volume.json").read_text())["arguments"]
        if known != arguments:
            raise RpcError(
                code,
                f"volume {volume} is mounted on this node as {' '.join(known)}, not {' '.join(arguments)}: give a volume with "
                "other attributes a volumeHandle of its own",
            )

    def _end_unused(self, volume: str) -> None:
        directory = self._directory(volume)
        source = mount_at(directory / "mnt")
        if source is None or any(one.device == source.device and one.mount_id != source.mount_id for one in mounts()):
            return
        try:
            self._command(["unmount", str(directory / "mnt")], {})
        except RpcError as error:  # the pod is gone all the same; the next publish or unpublish tries again
            _log.warning("volume %s: %s", volume, error)
            return
        for path in (directory / "volume.json", directory / "mnt", directory):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)

    def _command(self, arguments: list[str], environment: dict[str, str]) -> None:
        try:
            code, said = ask(self.holder, arguments, environment)
        except OSError as error:
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE,
                f"the holder at {self.holder} does not answer ({error}); is its container up?",
            ) from error
        if code:
            raise RpcError(_CODES.get(code, grpc.StatusCode.INTERNAL), said.replace("\n", "; ") or f"exit code {code}")


def _named(request: Any) -> tuple[str, Path]:
    target = Path(request.target_path)
    if not request.volume_id or not target.is_absolute() or ".." in target.parts:
        raise _invalid("volume_id and an absolute target_path are required")
    return request.volume_id, target


def _checked(request: Any) -> tuple[str, Path]:
    capability = request.volume_capability
    if not request.HasField("volume_capability") or not capability.HasField("mount"):
        raise _invalid("volume_capability must be a mount: volumeMode Filesystem")
    if capability.mount.mount_flags:
        raise _invalid(
            f"mountOptions {', '.join(capability.mount.mount_flags)}: leave them out, options are volumeAttributes"
        )
    return _named(request)


def _arguments(attributes: Mapping[str, str]) -> list[str]:
    """LAKE and the options of `stepfs mount`."""
    given = {name: value for name, value in attributes.items() if not name.startswith(_OF_KUBERNETES)}
    if unknown := sorted(given.keys() - set(ATTRIBUTES)):
        raise _invalid(f"unknown volumeAttributes: {', '.join(unknown)}; known are {', '.join(ATTRIBUTES)}")
    if "://" not in given.get("lake", ""):
        raise _invalid("volumeAttributes: lake is missing; write the URL of a lake, such as s3://bucket/run")
    return [given["lake"], *(f"--{name}={given[name]}" for name in ATTRIBUTES[1:] if name in given)]


def _environment(secrets: Mapping[str, str]) -> dict[str, str]:
    if strange := sorted(name for name in secrets if not _SECRET.fullmatch(name)):
        raise _invalid(f"the secret has the keys {', '.join(strange)}; use AWS_…, GOOGLE_… and AZURE_… variables alone")
    return dict(secrets)


def _make_target(target: Path) -> None:
    target.mkdir(mode=0o750, parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"{target} is not empty; empty it, or name another path")


def _answers(directory: Path) -> bool:
    return isinstance(answer_within((directory / ".stepfs/config.json").read_bytes), bytes)


def _bind(source: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None) != 0:
        code = ctypes.get_errno()
        raise RpcError(grpc.StatusCode.INTERNAL, f"cannot bind {source} at {target}: {os.strerror(code)}")


def _unbind(target: Path, there: Mounted) -> None:
    if there.fstype != "fuse.stepfs":
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"{target} is a mount of {there.fstype}, not of stepfs")
    try:
        unmount(target, lazy=False)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _log.warning("%s has open files: its readers keep them until they close them", target)
        unmount(target, lazy=True)
