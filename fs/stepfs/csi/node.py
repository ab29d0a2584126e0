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
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from grpc import StatusCode
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from stepfs._internal.control_files import answer_within
from stepfs._internal.declared_option import declared
from stepfs.csi.holder import ask
from stepfs.csi.messages import BYTES, MESSAGES, ONCE, READERS, WRITERS
from stepfs.mount.host.mount_points import Health, check_health, unmount
from stepfs.mount.host.mount_table import FSTYPE, Mounted, mount_at, mounts, real_directory
from stepfs.mount.logs import log_file
from stepfs.mount.options import MountOptions
from stepfs.mount.redact import redacted

_log = logging.getLogger("stepfs.csi")

_OF_NO_VOLUME: Final = {
    "allow_other",  # always: pods run as anybody
    "checkpoint_dir", "next_step",  # the trainer's directory is in no container of the driver
    "log_format", "metrics_port", "metrics_address",  # the node's: variables of `holder`, an option of `plugin`
    "wait_for_lake_s",  # kubelet asks again, and a daemon that waits on behind its back would be nobody's
}  # fmt: skip
OPTIONS: Final = {  # attribute → its type and its option of `stepfs mount`
    found[1].flag.partition("/")[0].removeprefix("--"): found
    for name, found in declared(MountOptions).items()
    if name not in _OF_NO_VOLUME
}
_OF_KUBERNETES: Final = "csi.storage.k8s.io/"  # facts about the pod, where the driver's object asks for them
_CODES: Final = {  # of the exit codes of `stepfs mount`
    2: StatusCode.INVALID_ARGUMENT,
    3: StatusCode.NOT_FOUND,
    4: StatusCode.FAILED_PRECONDITION,
    5: StatusCode.DATA_LOSS,
    6: StatusCode.UNAVAILABLE,
}
_MS_BIND: Final = 4096
_PENDING_S: Final = 5.0  # more would fill the server's threads with kubelet's repetitions
_LINE_MAX: Final = 900  # characters: an event has 1,024 bytes, and kubelet's words before it
_SCRAPE_S: Final = 2.0  # of the ten that Prometheus waits


class RpcError(Exception):
    """A request ends with this status, and one line for `kubectl describe pod`."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(redacted("; ".join(message.splitlines()))[:_LINE_MAX])
        self.code = code


def _invalid(message: str) -> RpcError:
    return RpcError(StatusCode.INVALID_ARGUMENT, message)


@dataclass(slots=True)
class Volumes:
    """The volumes of this node. `base` is seen by holder and plugin at one path, with its mounts."""

    base: Path
    holder: Path  # its socket
    _locks: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def __post_init__(self) -> None:
        self.base.mkdir(parents=True, exist_ok=True)
        self.base.chmod(0o700)  # each mount lets all users in: as far as a pod's own directories do

    def publish(self, request: Any) -> Any:
        """Make the volume appear at the target path; again at any time, also to repair one whose daemon has died.

        What is there and answers is right, whatever the request says. Of what has died each error is UNAVAILABLE: others
        but ABORTED make kubelet forget that it has published the volume.
        """
        volume, target = _named(request)
        with self._alone(volume):
            there = mount_at(target)
            if there is not None and there.fstype != FSTYPE:
                raise RpcError(StatusCode.ALREADY_EXISTS, f"{target} is a mount of {there.fstype}; unmount it first")
            if there is not None and not self._has(volume, there):
                raise RpcError(StatusCode.ALREADY_EXISTS, f"{target} has another volume; unpublish that first")
            try:
                if there is None or not _alive(there):
                    self._appear(request, volume, target, again=there is not None)
                elif changes := self._changes(volume, _attributes(request.volume_context)):
                    _log.warning("volume %s stays as it is: %s", volume, changes)
            except Exception as error:
                if there is None:
                    raise
                raise RpcError(StatusCode.UNAVAILABLE, str(error)) from error
        return MESSAGES["NodePublishVolumeResponse"]()

    def _appear(self, request: Any, volume: str, target: Path, *, again: bool) -> None:
        _check_capability(volume, request)
        directory = self._directory(volume)
        if not again:
            _make_target(target)
        try:
            self._serve(directory, volume, request, again=again)
            if again:
                _uncover(target)
            _bind(directory / "mnt", target)
        except BaseException:
            if not again:
                self._end_unused(directory, volume)  # kubelet unpublishes only what was published
            raise
        _log.info("volume %s is at %s; its daemon logs to %s", volume, target, log_file(directory / "mnt").name)

    def unpublish(self, request: Any) -> Any:
        """Take the volume from the target path, and end its daemon with the last one. What is not there is no error."""
        volume, target = _named(request)
        with self._alone(volume):
            while (there := mount_at(target)) is not None:
                if not self._has(volume, there):
                    raise RpcError(StatusCode.FAILED_PRECONDITION, f"{target} has another volume; unpublish that")
                _unbind(target, there)
            if target.is_dir() and not target.is_symlink():
                try:
                    target.rmdir()
                except OSError as error:
                    _log.warning("%s stays: %s", target, error.strerror)
        self._sweep()
        return MESSAGES["NodeUnpublishVolumeResponse"]()

    def stats(self, request: Any) -> Any:
        """Whether the mount answers.

        There are no figures, not even of what is used: a volume that is only read is never full, and alerts divide what
        they are given. Without `available`, kubelet takes it as 0; without any usage, it drops the condition.
        """
        volume, path = request.volume_id, _place(request.volume_path)
        if not volume or not request.volume_path:
            raise _invalid("volume_id and volume_path are required")
        there = None if path is None else mount_at(path)
        if there is None or there.fstype != FSTYPE or not self._has(volume, there):
            raise RpcError(StatusCode.NOT_FOUND, f"the volume is not at {request.volume_path}")
        health, error = check_health(there, below=".stepfs")
        response = MESSAGES["NodeGetVolumeStatsResponse"](usage=[{"unit": BYTES}])
        response.volume_condition.abnormal = health is not Health.ALIVE
        why = error.strerror if error else "the mount does not answer"
        response.volume_condition.message = "the mount answers" if health is Health.ALIVE else f"{path}: {why}"
        return response

    def _has(self, volume: str, there: Mounted) -> bool:
        """Whether the mount at a target is of this volume, or of a daemon that no volume has any more."""
        alike = [Path(one.directory) for one in mounts() if one.device == there.device]
        places = [one for one in alike if one.name == "mnt" and one.parent.parent == self.base]
        return not places or self._directory(volume) / "mnt" in places

    @contextmanager
    def _alone(self, volume: str) -> Iterator[None]:
        lock = self._locks[volume]
        if not lock.acquire(timeout=_PENDING_S):
            raise RpcError(StatusCode.ABORTED, f"another request is not done; kubelet asks again (volume {volume})")
        try:
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """End the daemons of volumes that are published nowhere: of the one that was left, and of those that were busy."""
        for directory, volume in self.known():
            lock = self._locks[volume]
            if lock.acquire(blocking=False):
                try:
                    self._end_unused(directory, volume)
                finally:
                    lock.release()

    def known(self) -> list[tuple[Path, str]]:
        """(directory, volume) of all volumes that have a directory."""
        found = []
        for path in sorted(self.base.glob("*/volume.json")):
            with suppress(OSError, ValueError, KeyError):  # gone meanwhile, or cut off with the node's power
                found.append((path.parent, str(json.loads(path.read_text())["volume"])))
        return found

    def _directory(self, volume: str) -> Path:
        return self.base / hashlib.sha256(volume.encode()).hexdigest()[:16]

    def _serve(self, directory: Path, volume: str, request: Any, *, again: bool) -> None:
        """Have a daemon serve the volume at `mnt` of its directory."""
        mount, attributes = directory / "mnt", _attributes(request.volume_context)
        source = mount_at(mount)
        if source is not None and _alive(source):
            if (changes := self._changes(volume, attributes)) and not again:
                needs = f"a volume with other attributes needs a volumeHandle of its own (volume {volume})"
                raise RpcError(StatusCode.FAILED_PRECONDITION, f"{needs}: on this node, {changes}")
            return
        lake, *options = _arguments(attributes)
        if source is None:  # else a dead mount lies there, and mounting clears it
            mount.mkdir(mode=0o755, parents=True, exist_ok=True)
        (directory / "volume.json").write_text(json.dumps({"volume": volume, "attributes": attributes}))
        self._command(["mount", *options, "--allow-other", "--", lake, str(mount)], dict(request.secrets))

    def _changes(self, volume: str, attributes: dict[str, str]) -> str:
        """In what the attributes differ from those with which the volume was mounted."""
        known = attributes  # where the file is lost: nothing is known against them
        with suppress(OSError, ValueError, KeyError):
            known = json.loads((self._directory(volume) / "volume.json").read_text())["attributes"]
        names = sorted({name for name, _ in known.items() ^ attributes.items()})
        return ", ".join(f"{name} is {known.get(name)!r}, not {attributes.get(name)!r}" for name in names)

    def _end_unused(self, directory: Path, volume: str) -> None:
        source = mount_at(directory / "mnt")
        if source is not None:
            if any(one.device == source.device and one.mount_id != source.mount_id for one in mounts()):
                return
            try:
                self._command(["unmount", str(directory / "mnt")], {})
            except RpcError as error:  # the pod is gone all the same; the next unpublish tries again
                _log.warning("volume %s: %s", volume, error)
                return
        for path in (directory / "mnt", directory / "ca.pem", directory / "volume.json", directory):
            with suppress(OSError):  # what is left is cleared by the next publish, or sweep
                path.rmdir() if path.is_dir() else path.unlink()

    def _command(self, arguments: list[str], environment: dict[str, str]) -> None:
        try:
            code, said = ask(self.holder, arguments, environment)
        except OSError as error:
            silent = f"the holder at {self.holder} does not answer ({error}); is its container up?"
            raise RpcError(StatusCode.UNAVAILABLE, silent) from error
        if code:
            raise RpcError(_CODES.get(code, StatusCode.INTERNAL), said or f"exit code {code}")


def _named(request: Any) -> tuple[str, Path]:
    target = _place(request.target_path)
    if not request.volume_id or target is None:
        raise _invalid("volume_id and an absolute target_path are required")
    return request.volume_id, target


def _place(text: str) -> Path | None:
    """As the mount table has it: without links, which kubelet's directory may have. None: no absolute path."""
    path = Path(text)
    return real_directory(path) if path.is_absolute() and ".." not in path.parts and "\0" not in text else None


def _check_capability(volume: str, request: Any) -> None:
    capability, mode = request.volume_capability, request.volume_capability.access_mode.mode
    if not capability.HasField("mount"):
        raise _invalid("volume_capability must be a mount: volumeMode Filesystem")
    if mode in ONCE and request.readonly:  # the pod says itself that it only reads
        _log.info("volume %s is read-only, though its accessModes say %s", volume, WRITERS[mode])
    elif mode not in READERS:  # `readonly` is each pod's; the mount is read-only without it, too
        pods = ", or readOnly: true beside its claim in each pod" if mode in ONCE else ""
        raise _invalid(
            f"accessModes {WRITERS.get(mode, 'unknown')}: a lake is read-only; write accessModes: [ReadOnlyMany] in the"
            f" PersistentVolume and in its claim{pods}"
        )
    if capability.mount.mount_flags:
        raise _invalid(
            f"mountOptions {', '.join(capability.mount.mount_flags)}: leave them out, options are volumeAttributes"
        )
    if capability.mount.fs_type:
        raise _invalid(f"fsType {capability.mount.fs_type}: leave it out, a lake is no disk to be formatted")


def _attributes(context: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in context.items() if not name.startswith(_OF_KUBERNETES)}


def _arguments(given: Mapping[str, str]) -> list[str]:
    """LAKE and the options of `stepfs mount`, which checks their values itself."""
    if unknown := sorted(given.keys() - OPTIONS.keys() - {"lake"}):
        raise _invalid(f"unknown volumeAttributes: {', '.join(unknown)}; known are lake, {', '.join(OPTIONS)}")
    if "://" not in given.get("lake", ""):
        raise _invalid("volumeAttributes: lake is missing; write the URL of a lake, such as s3://bucket/run")
    return [given["lake"], *(word for name in OPTIONS if name in given for word in _words(name, given[name]))]


def _words(name: str, value: str) -> list[str]:
    kind, option = OPTIONS[name]
    flag, _, negative = option.flag.partition("/")
    if kind is not bool:
        if name == "cache-dir" and not value.startswith("/"):  # relative to whatever directory the holder is in
            raise _invalid(f"volumeAttributes: cache-dir is {value!r}; name a directory of the node, /var/cache/stepfs")
        return [f"{flag}={value}"]
    if value not in {"true", "false"}:
        raise _invalid(f'volumeAttributes: {name} is "true" or "false", not {value!r}')
    return [flag if value == "true" else negative] if value == "true" or negative else []


def _make_target(target: Path) -> None:
    target.mkdir(mode=0o750, parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise RpcError(StatusCode.FAILED_PRECONDITION, f"{target} is not empty; empty it, or name another path")


def _alive(mounted: Mounted) -> bool:
    """Whether a mount's daemon answers, or is certainly gone. `RpcError` if it is silent: it may have readers."""
    health, _ = check_health(mounted, below=".stepfs")
    if health not in {Health.ALIVE, Health.DEAD}:
        silent = f"the mount at {mounted.directory} does not answer now; kubelet asks again"
        raise RpcError(StatusCode.UNAVAILABLE, silent)
    return health is Health.ALIVE


def _uncover(target: Path) -> None:
    """Leave one of the dead mounts at a target: below it is the empty directory, which would look like an empty lake."""
    while len(stack := [one for one in mounts() if one.directory == str(target)]) > 1 and stack[-2].fstype == FSTYPE:
        unmount(target, lazy=True)


def _bind(source: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None) != 0:
        code = ctypes.get_errno()
        raise RpcError(StatusCode.INTERNAL, f"cannot bind {source} at {target}: {os.strerror(code)}")


def _unbind(target: Path, there: Mounted) -> None:
    if there.fstype != FSTYPE:
        raise RpcError(StatusCode.FAILED_PRECONDITION, f"{target} is a mount of {there.fstype}, not of stepfs")
    try:
        unmount(target, lazy=False)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _log.warning("%s has open files: its readers keep them until they close them", target)
        unmount(target, lazy=True)


class Scraped(Collector):
    """The metrics of all daemons, each with `instance` NODE/VOLUME, which is what rules and dashboards tell mounts by."""

    def __init__(self, volumes: Volumes, node: str) -> None:
        self._volumes, self._node = volumes, node

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for directory, volume in self._volumes.known():
            there = mount_at(directory / "mnt")
            read = (directory / "mnt/.stepfs/metrics").read_text
            text = None if there is None else answer_within(read, _SCRAPE_S, device=there.device)
            if not isinstance(text, str):
                continue  # its series end, which is what the alert on a mount that is gone looks at
            labels = {"instance": f"{self._node}/{volume}"}
            for family in text_string_to_metric_families(text):
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                joined.samples += [sample._replace(labels=labels | sample.labels) for sample in family.samples]
        yield from families.values()
