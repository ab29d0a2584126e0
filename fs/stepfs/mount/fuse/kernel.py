"""The kernel's end of a mount: pyfuse3's session, the names that the kernel holds, and notifications to it.

Notifications run in worker threads only: one from the loop's own thread can deadlock on a locked page, and the loop
itself must answer requests for paths through the mount.
"""

import itertools
import logging
import os
import shutil
import signal
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import pyfuse3
import trio

from stepfs.errors import RefusedError
from stepfs.format.ids import SliceIndex, Step
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.fuse.link import Link, descriptor_of_libfuse, has_ended, held
from stepfs.mount.host.abort import places_of
from stepfs.mount.host.mount_points import unmount
from stepfs.mount.host.mount_table import FSTYPE, descriptor_of, mount_at, source_of
from stepfs.view.inodes import Fixed
from stepfs.view.names import step_name
from stepfs.view.ranks import FileNames
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

_CHUNK_BITS: Final = 12
_CHUNK_STEPS: Final = 1 << _CHUNK_BITS

_DEVICE: Final = Path("/dev/fuse")
_NAMELESS: Final = "could not determine username"  # says fusermount3
_READ_S: Final = 0.05
_BATCH: Final = 512  # names withdrawn at a time


class LookupCounts:
    """The step directories that the kernel holds, so that exactly their names are withdrawn when steps leave the view."""

    def __init__(self) -> None:
        self._chunks: dict[int, array[int]] = {}
        self._used: dict[int, int] = {}

    def add(self, step: Step) -> None:
        """Count one more reference of the kernel to the directory (LOOKUP, or an entry of READDIRPLUS)."""
        self.add_range(step, Step(step + 1))

    def add_range(self, first: Step, end: Step) -> None:
        while first < end:
            number, offset = divmod(first, _CHUNK_STEPS)
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = array("I", bytes(4 * _CHUNK_STEPS))
                self._used[number] = 0
            stop = min(_CHUNK_STEPS, offset + end - first)
            counts = chunk[offset:stop]
            self._used[number] += counts.count(0)
            chunk[offset:stop] = array("I", [count + 1 for count in counts])
            first = Step(first + stop - offset)

    def forget(self, step: Step, count: int) -> None:
        number, offset = divmod(step, _CHUNK_STEPS)
        chunk = self._chunks.get(number)
        if chunk is None or not chunk[offset]:
            return
        chunk[offset] = max(0, chunk[offset] - count)
        if not chunk[offset]:
            self._used[number] -= 1
            if not self._used[number]:
                del self._chunks[number], self._used[number]

    def between(self, first: Step, end: Step) -> Iterator[Step]:
        """Known steps in [first, end), ascending; a snapshot per chunk, so `forget` may run meanwhile."""
        for number in sorted(self._chunks):
            base = number << _CHUNK_BITS
            if base >= end or base + _CHUNK_STEPS <= first:
                continue
            chunk = self._chunks.get(number)
            if chunk is None:
                continue
            for offset in range(max(0, first - base), min(_CHUNK_STEPS, end - base)):
                if chunk[offset]:
                    yield Step(base + offset)

    def __len__(self) -> int:
        return sum(self._used.values())


def fuse_options(lake: str, *, allow_other: bool) -> set[str]:
    """Mount options. Never one that would run code or grant rights from a lake's bytes."""
    options = {
        *pyfuse3.default_options,
        f"fsname={source_of(lake)}",
        "subtype=stepfs",
        "ro",
        "nosuid",
        "nodev",
        "noexec",
    }
    return options | {"allow_other"} if allow_other else options


@contextmanager
def mounted(operations: pyfuse3.Operations, directory: Path, options: set[str]) -> Iterator[Link]:
    """Mount. On leaving, detach if our mount is still the one at this place.

    A passed mount (`/dev/fd/N`) is only served.
    """
    passed = descriptor_of(directory)
    if passed is not None:
        _init(operations, directory, options)
        try:
            yield Link(passed, passed, b"", owner=False)
        finally:
            pyfuse3.close(unmount=False)
        return
    _check_rights()
    others = held()
    _init(operations, directory, options)
    at = mount_at(directory)
    if at is None or at.fstype != FSTYPE:
        pyfuse3.close(unmount=False)
        raise RefusedError(f"{directory}: the mount disappeared at once; see `dmesg`")
    number = descriptor_of_libfuse(others)
    with _detached_after(Link(number, os.dup(number), b"", mount=at.device)) as link:
        link.record()
        yield link


@contextmanager
def taken(operations: pyfuse3.Operations, options: set[str], link: Link) -> Iterator[Link]:
    """Serve the mount that another daemon made; its link's number is free for libfuse. On leaving as `mounted`."""
    _init(operations, Path(f"/dev/fd/{link.number}"), options)
    with _detached_after(link):
        yield link


@contextmanager
def _detached_after(link: Link) -> Iterator[Link]:
    try:
        yield link
    finally:
        if link.owner and link.device >= 0 and not has_ended(link.device):
            for place, _ in places_of(link.mount):  # it may be bound elsewhere by now, or renamed
                with suppress(OSError):  # somebody else was faster
                    unmount(Path(place), lazy=True)
        pyfuse3.close(unmount=False)
        if link.device >= 0:
            os.close(link.device)


def _check_rights() -> None:
    if not _DEVICE.exists():
        raise RefusedError(
            f"there is no {_DEVICE} here: load the fuse module, or give the container the device (--device /dev/fuse)"
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise RefusedError("mounting without root needs the program fusermount3: install the package fuse3")


def _init(operations: pyfuse3.Operations, directory: Path, options: set[str]) -> None:
    """`pyfuse3.init`; the error contains the text that libfuse writes to stderr."""
    with os.fdopen(os.memfd_create("stepfs-fuse"), "w+b") as said:  # needs no writable file system
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            pyfuse3.init(operations, str(directory), options)
            failure: RuntimeError | None = None
        except RuntimeError as error:
            failure = error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        said.seek(0)
        lines = said.read().decode(errors="replace").split("\n")
    text = "; ".join(line.strip() for line in lines if line.strip())
    if _NAMELESS in text:
        raise RefusedError(
            f"cannot mount on {directory}: user id {os.getuid()} has no name here, and fusermount3 mounts for users with a"
            " name only; add a line for it to /etc/passwd, or mount as root"
        )
    if failure is not None:
        raise RefusedError(
            f"cannot mount on {directory}: {text or failure}; it needs /dev/fuse and, without root, fusermount3"
            " (in a container: --cap-add SYS_ADMIN --device /dev/fuse)"
        ) from failure
    if text:
        _log.info("libfuse: %s", text)


@contextmanager
def interrupted_reads() -> Iterator[None]:
    """Inside the context a system call of the main thread blocks for at most 50 ms: a read of /dev/fuse could block the
    loop for ever. Main thread only.
    """
    before = signal.signal(signal.SIGALRM, _nothing)
    signal.setitimer(signal.ITIMER_REAL, _READ_S, _READ_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    pass


@dataclass(frozen=True, eq=False)
class KernelPageCache:
    """Implements `stepfs.data.page_cache.PageCache`."""

    directory: Path
    names: FileNames

    def path(self, step: Step, index: SliceIndex) -> Path:
        """The file of a slice, under the name of the lowest rank that reads it."""
        return self.directory / os.fsdecode(step_name(step)) / os.fsdecode(self.names.name_of(index))

    def store_pages(self, inode: int, offset: int, data: memoryview) -> None:
        """Put verified bytes into the page cache for a reader's first read; OSError if the kernel refuses them."""
        pyfuse3.notify_store(inode, offset, data)  # type: ignore[arg-type]  # any contiguous buffer


@dataclass(eq=False)
class Withdrawal:
    """Withdraws names of steps from the kernel as `Tree.first_visible` rises."""

    tree: Tree
    known: LookupCounts
    meter: Meter
    invalidate: Callable[[int, bytes], None] = pyfuse3.invalidate_entry

    def __post_init__(self) -> None:
        self._wake = trio.Event()

    def note(self) -> None:
        """Steps left the view. Never waits."""
        self._wake.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Withdraw names until cancelled; a started batch is finished."""
        task_status.started()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            names = (step_name(step) for step in self.known.between(Step(0), self.tree.first_visible()))
            while batch := list(itertools.islice(names, _BATCH)):
                await trio.to_thread.run_sync(self._withdraw, batch)
                self.meter.steps_invalidated += len(batch)

    def _withdraw(self, names: list[bytes]) -> None:
        for name in names:
            try:
                self.invalidate(Fixed.ROOT, name)
            except FileNotFoundError:
                pass  # the kernel has already dropped it
            except OSError as error:
                # The name stays until the kernel needs the memory; opening a file under it already gives ENOENT.
                _log.info("the kernel keeps the name %s: %s", name.decode(), error)
