"""Real lakes, real mounts, through the doors users have: `Producer` and the `stepfs` command."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import json_schemas
import pytest
import trio

from stepfs.format.grid import Grid
from stepfs.lake.identity import create_lake
from stepfs.mount.host import mount_table
from stepfs.mount.host.kernel import process_start
from stepfs.mount.host.mount_points import unmount
from stepfs.mount.logs import log_file
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs_producer import Producer

STEPFS = [sys.executable, "-c", "from stepfs.cli import main; main()"]
needs_resend = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 9), reason="this kernel sends no request again"
)
PATIENCE_S = 60.0  # it only tells a hang from an end, on a machine that does many other things


def make_lake(url: str, *, slices: Grid | int = 2, ext: str = ".bin") -> None:
    """On a store that is known to be honest: `probe_store` and its races, which take seconds on SeaweedFS, are left out."""

    async def make() -> None:
        store = open_store(url)
        await create_lake(store, slices=slices, ext=ext)
        await store.aclose()

    async def trust(_: Store, *, thorough: bool) -> None:
        assert thorough

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepfs.lake.identity.probe_store", trust)
        trio.run(make)


def payload(step: int, index: int, size: int = 3000) -> bytes:
    """Bytes that name where they belong, of a size that differs from file to file."""
    seed = hashlib.sha256(b"%d/%d" % (step, index)).digest()
    length = max(1, size - (step * 7 + index * 131) % max(1, size // 3))
    return (seed * (length // 32 + 1))[:length]


def produce(url: str, steps: int, *, slices: int = 2, size: int = 3000, producer: str = "p0") -> list[list[bytes]]:
    """Commit `steps` steps; returns their payloads. Start with an empty lake."""
    batches = [[payload(step, index, size) for index in range(slices)] for step in range(steps)]
    with Producer(url, producer_id=producer) as writer:
        for number, batch in enumerate(batches):
            writer.append(batch, position=number)
    return batches


def lake_with(url: str, steps: int, *, slices: int = 2, ext: str = ".bin", size: int = 3000) -> list[list[bytes]]:
    """A new lake and so many steps of it; returns their payloads."""
    make_lake(url, slices=slices, ext=ext)
    return produce(url, steps, slices=slices, size=size)


def stepfs(*arguments: str | Path, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run the command line, in a process of its own."""
    return forked.ran("stepfs", arguments, timeout=timeout_s)


def change_constants(patch: pytest.MonkeyPatch, constants: Mapping[str, float]) -> None:
    """Change "MODULE:NAME" in every interpreter that is started from here, daemons included, until the test ends."""
    patch.setenv("TESTS_CONSTANTS", json.dumps(dict(constants)))
    patch.setenv("PYTHONPATH", str(Path(__file__).parent / "changed_constants"), prepend=os.pathsep)


@dataclass
class Mount:
    """A mounted lake."""

    directory: Path
    log: Path
    pid: int
    cache_dir: Path
    allowed: list[str] = field(default_factory=list)  # parts of log warnings this test provokes
    checked: set[str] = field(default_factory=set)  # documents that were held against their schemas
    keeper: int | None = None

    def step(self, step: int) -> Path:
        return self.directory / f"step-{step:09d}"

    def file(self, step: int, rank: int, ext: str = ".bin") -> Path:
        return self.step(step) / f"rank-{rank:05d}{ext}"

    def status(self) -> dict[str, Any]:
        return self._document("status", "status-mount")

    def config(self) -> dict[str, Any]:
        return self._document("config", "config")

    def _document(self, name: str, schema: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f".stepfs/{name}.json").read_text())
        if name not in self.checked:  # once: tests poll
            json_schemas.check(schema, found)
            self.checked.add(name)
        return found

    def steps(self) -> list[str]:
        return [name for name in sorted(os.listdir(self.directory)) if name.startswith("step-")]

    def requests(self) -> dict[str, int]:
        return dict(self.status()["requests"])

    def wait_for(self, step: int) -> None:
        """Until a step is committed, through the mount's own door."""
        (self.directory / f".stepfs/wait/{step}").read_text()

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@contextmanager
def mounted(url: str, directory: Path, *options: str, allowed: list[str] | None = None) -> Iterator[Mount]:
    """`stepfs mount`; on leaving nothing is left, also after a failure. Fails on faults and unannounced warnings."""
    if mount_table.mount_at(directory) is None:  # a dead mount answers not even mkdir
        directory.mkdir(exist_ok=True)
    logs, cache = directory.parent / "logs", directory.parent / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPFS_LOG_DIR", str(logs))
        patch.setenv("XDG_CACHE_HOME", str(cache))
        done = stepfs("mount", url, directory, *options)
    assert done.returncode == 0, done.stderr
    mount = None
    try:
        config = json.loads((directory / ".stepfs/config.json").read_text())
        json_schemas.check("config", config)
        mount = Mount(
            directory, logs / log_file(directory).name, config["pid"], Path(config["cache_dir"] or directory / "no-cache"), allowed or [],
            keeper=config["keeper"],
        )  # fmt: skip
        yield mount
    finally:
        clear(directory, mount)
    lines = mount.log.read_text().splitlines()
    bad = [line for line in lines if " ERROR " in line or " WARNING " in line or "Traceback" in line]
    unannounced = [line for line in bad if not any(part in line for part in mount.allowed)]
    assert not unannounced, "\n".join(unannounced)


def clear(directory: Path, mount: Mount | None) -> None:
    """No mount, no process."""
    while mount_table.mount_at(directory) is not None:
        try:
            unmount(directory, lazy=True)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a daemon that got a signal to end has unmounted it meanwhile
                raise
    if mount is not None:
        try:
            ended(mount)
        except AssertionError:
            os.kill(mount.pid, signal.SIGKILL)
            raise


def ended(mount: Mount) -> None:
    """Wait for the end of its daemon, and of its keeper."""
    for pid in (mount.pid, mount.keeper):
        if pid is not None:
            gone(pid)


def gone(pid: int) -> None:
    """Wait for the end of a process."""
    until(lambda: not running(pid), f"process {pid} is still there")


def running(pid: int) -> bool:
    if process_start(pid) is None:
        return False
    return " Z " not in Path(f"/proc/{pid}/stat").read_text()


def until(
    done: Callable[[], bool], what: str | Callable[[], str], *, within_s: float = PATIENCE_S, every_s: float = 0.01
) -> None:
    """Wait for another process; the only clock here is the real one. `what` is the message of the failure. `every_s`: of a
    look that takes a process.
    """
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(every_s)


def open_files(pid: int) -> dict[Path, str]:
    """What the descriptors of a process refer to; those that it closes meanwhile are left out."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[descriptor] = os.readlink(descriptor)
    return found
