"""Open files and directories: a slice with its bytes pinned, a small content that was fixed at the open, a listing.

An entry's id is a function of its name, and listings are in order of ids, so a reader that comes back with an id
continues right behind it. The range of steps is fixed when a listing starts from the beginning.
"""

import base64
import errno
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import pyfuse3
import trio

from stepfs.data.slices import SliceHandle
from stepfs.errors import CorruptError, StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.mount.fuse.guard import Shares, errno_of
from stepfs.mount.fuse.kernel import LookupCounts
from stepfs.mount.host.kernel import lineage
from stepfs.view import attributes
from stepfs.view.attributes import BLOCK_BYTES_HINT, Attributes
from stepfs.view.inodes import INODES_PER_STEP, directory_inode, slice_inode, step_file_inode
from stepfs.view.names import CONTROL_DIRECTORY, step_name
from stepfs.view.ranks import FileNames
from stepfs.view.tree import StepTable, Tree

_log = logging.getLogger("stepfs.mount")

NS_PER_MS: Final = 1_000_000
_SECTOR_BYTES: Final = 512

_FIRST_STEP_ID: Final = 3
ReaddirReply = Callable[[pyfuse3.ReaddirToken, bytes, pyfuse3.EntryAttributes, int], bool]
_FAILED_FOR_S: Final = 2.0
_LATELY_S: Final = 10.0
_OPENERS_MAX: Final = 256
HELD_BACK_S: Final = 1.0  # umount2(2) follows the question at once

_T = TypeVar("_T")
_MADE: Final = 1 << 63  # in handles of control files, and of listings of fixed directories
_KIND: Final = 3 << 61
_STEP_BITS: Final = 41
_NUMBER: Final = (1 << _STEP_BITS) - 1
_SERIAL_BITS: Final = 12
_GENERATIONS: Final = 1 << 8
_FIXED_BITS: Final = 4
_CONTENT_BYTES_MAX: Final = 128 << 20  # of all that is open under handles of its own
_CONTENT_BYTES_LEAST: Final = 64 << 10  # that one of them counts: so there are fewer than serials


class Replies:
    """Makes pyfuse3's structures of the view's attributes; the mounting user owns every file."""

    def __init__(self) -> None:
        self._uid = os.getuid()
        self._gid = os.getgid()

    def entry(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        """A fresh structure for one reply."""
        entry = pyfuse3.EntryAttributes()
        self.fill(entry, attributes)
        return entry

    def fill(self, entry: pyfuse3.EntryAttributes, attributes: Attributes) -> None:
        """Every field of a structure, new or used."""
        entry.generation = 0
        entry.st_uid = self._uid
        entry.st_gid = self._gid
        entry.st_rdev = 0
        entry.st_blksize = BLOCK_BYTES_HINT
        entry.entry_timeout = attributes.keep_s
        entry.attr_timeout = attributes.keep_s
        entry.st_mode = attributes.mode
        entry.st_nlink = attributes.nlink
        entry.st_size = attributes.size
        entry.st_blocks = -(-attributes.size // _SECTOR_BYTES)
        time_ns = attributes.time_ms * NS_PER_MS
        entry.st_ino = attributes.inode
        entry.st_atime_ns = time_ns
        entry.st_mtime_ns = time_ns
        entry.st_ctime_ns = time_ns


class Rows:
    """One reply to READDIRPLUS while it is filled; `add` returns False once it is full."""

    def __init__(self, replies: Replies, reply: ReaddirReply, token: pyfuse3.ReaddirToken) -> None:
        self._replies = replies
        self._reply = reply
        self._token = token
        self._entry = pyfuse3.EntryAttributes()

    def add(self, number: int, name: bytes, found: Attributes) -> bool:
        self._replies.fill(self._entry, found)
        return self._reply(self._token, name, self._entry, number)

    def add_steps(self, runs: Iterable[tuple[range, int]], like: Attributes) -> int | None:
        """Add step directories, as runs that share one time in ms, else like `like`; returns the first without space.

        These loops list 10⁶ steps: they reuse one structure and change only the fields that differ.
        """
        reply, token, entry = self._reply, self._token, self._entry
        self._replies.fill(entry, like)
        for steps, time_ms in runs:
            entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = time_ms * NS_PER_MS
            inode = directory_inode(Step(steps.start))
            for step in steps:
                entry.st_ino = inode
                if not reply(token, step_name(Step(step)), entry, step + _FIRST_STEP_ID):
                    return step
                inode += INODES_PER_STEP
        return None


class OpenDirectory(Protocol):
    """The object behind a directory handle."""

    def list_after(self, after: int, rows: Rows) -> None:
        """Add entries with an id greater than `after` until the reply is full; 0 starts a new listing."""
        ...


@dataclass(eq=False)
class OpenRoot:
    """The root: `.stepfs` and the steps; `latest` is only looked up, so that no program that walks reads a step twice. Counts
    the lookups that it gives to the kernel.
    """

    table: StepTable
    tree: Tree
    control: Attributes
    known: LookupCounts
    shown: range | None = None

    def list_after(self, after: int, rows: Rows) -> None:
        if after == 0 or self.shown is None:  # or another daemon began it
            self.shown = self.tree.listed()
        if after < 1 and not rows.add(1, CONTROL_DIRECTORY, self.control):
            return
        steps = self._steps(self.shown, after)
        end = self._list_steps(steps, rows)
        self.known.add_range(Step(steps.start), Step(end))

    def _steps(self, shown: range, after: int) -> range:
        first = max(shown.start, after - _FIRST_STEP_ID + 1)
        if self.tree.options.steps is None:
            # The kernel must not get steps again that have left the view since the listing began.
            first = max(first, self.tree.first_visible())
        return range(first, max(first, shown.stop))

    def _list_steps(self, steps: range, rows: Rows) -> int:
        """List steps: reclaimed ones, committed ones, future ones (under --steps). Returns the end of those listed."""
        low = min(max(self.tree.first_visible(), steps.start), steps.stop)
        high = min(max(self.tree.next_step, low), steps.stop)
        empty_ms = self.table.identity.created_ms
        for part, runs in (
            (range(steps.start, low), [(range(steps.start, low), empty_ms)]),
            (range(low, high), attributes.runs_of_one_time(self.table, range(low, high))),
            (range(high, steps.stop), [(range(high, steps.stop), empty_ms)]),
        ):
            if part:
                like = attributes.step_directory(self.table, self.tree, Step(part.start))
                end = rows.add_steps(runs, like)
                if end is not None:
                    return end
        return steps.stop


@dataclass(frozen=True, eq=False)
class OpenStep:
    """A step: the files of every rank, all present from the first moment."""

    describe: Callable[[SliceIndex], Attributes]
    names: FileNames

    def list_after(self, after: int, rows: Rows) -> None:
        for place in range(after, len(self.names)):
            name, index = self.names[place]
            if not rows.add(place + 1, name, self.describe(index)):
                return


@dataclass(frozen=True, eq=False)
class OpenFixed:
    """A directory of `.stepfs/`: entries known when it was opened."""

    listed: Sequence[tuple[bytes, Attributes]]

    def list_after(self, after: int, rows: Rows) -> None:
        for number, (name, found) in enumerate(self.listed[after:], start=after + 1):
            if not rows.add(number, name, found):
                return


@dataclass(eq=False)
class OpenStepFiles:
    """`.stepfs/steps/`: the committed ones among the root's steps."""

    table: StepTable
    tree: Tree
    shown: range | None = None

    def list_after(self, after: int, rows: Rows) -> None:
        if after == 0 or self.shown is None:
            self.shown = self.tree.listed()
        for step in map(Step, range(max(self.shown.start, after), self.shown.stop)):
            if self.tree.readable(step):
                found = attributes.control(step_file_inode(step), self.table.time_ms(step), keep_s=0.0)
                if not rows.add(step + 1, b"%d.json" % step, found):
                    return


class OpenFile(ABC):
    """The object behind a file handle."""

    @abstractmethod
    async def read(self, offset: int, size: int) -> bytes | memoryview: ...

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what is held, if anything is."""


@dataclass(eq=False, slots=True)
class OpenSlice(OpenFile):
    """A rank's file. Prefetch state belongs to the slice, not here: forked workers share this handle."""

    handle: SliceHandle
    entry: StepEntry
    index: SliceIndex
    rank: int  # the lowest one that reads this slice; for the log
    failed_until: float = 0.0

    async def read(self, offset: int, size: int) -> memoryview:
        """Verified bytes, or an errno that concerns this file alone, logged with the object's key."""
        # After a failed readahead the kernel requests each page again; each must not wait a full deadline.
        if trio.current_time() < self.failed_until:
            raise pyfuse3.FUSEError(errno.ETIMEDOUT)
        try:
            data = await self.handle.read(offset, size)
        except StepfsError as error:
            if isinstance(error, StoreUnreachableError):
                self.failed_until = trio.current_time() + _FAILED_FOR_S
            self._report(error)
            raise pyfuse3.FUSEError(errno_of(error)) from error
        expected = max(0, min(size, self.handle.length - offset))
        assert len(data) == expected, f"{len(data)} bytes for {expected}: the kernel would pad with zeros"
        return data

    def _report(self, error: StepfsError) -> None:
        step, key = self.entry.step, self.entry.tgb.key
        facts = {
            "step": step,
            "slice": self.index,
            "rank": self.rank,
            "version": self.entry.version,
            "alike": (step, self.index, type(error)),  # a reader may retry at once, for ever
        }
        level = logging.ERROR if isinstance(error, CorruptError) else logging.WARNING
        where = "" if key in str(error) else f"{key}: "
        _log.log(level, "step %d slice %d cannot be read: %s%s", step, self.index, where, error, extra=facts)

    def close(self) -> None:
        self.handle.close()


class OpenUnread(OpenFile):
    """A rank's file, opened by this daemon's own threads to inspect its pages: it pins and fetches nothing."""

    async def read(self, offset: int, size: int) -> bytes:
        del offset, size
        raise pyfuse3.FUSEError(errno.EIO)


@dataclass(eq=False, slots=True)
class OpenContent(OpenFile):
    """A file of `.stepfs/` whose bytes are known."""

    content: bytes

    async def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


def inode_of(handle: int) -> int:
    """The inode for which any daemon gave the handle.

    inode << 1 | own                                        a slice, a directory of a step; `own`: opened by the daemon itself
    1 << 63 | kind | generation | 0 | step                  a file of `steps/`, `wait/`; kind: the inode's two highest bits
    1 << 63 | 0 | generation | serial | length, inode       a fixed file, which had so many bytes; a fixed directory
    """
    if not handle & _MADE:
        return handle >> 1
    number = handle & _NUMBER
    return handle & _KIND | (number if handle & _KIND else number & (1 << _FIXED_BITS) - 1)


def length_of(handle: int) -> int:
    """How many bytes a fixed file had when it was opened."""
    return (handle & _NUMBER) >> _FIXED_BITS


class Handles(Generic[_T]):
    """What is open, by handle. Opens of one slice, of one step's directory or of what is told of one step share a handle."""

    def __init__(self, shares: Shares | None = None) -> None:
        """`shares`: of the contents and listings that are made at each open, in bytes; errno EMFILE beyond them."""
        self.generation = 0  # how many daemons served this mount before: they gave other handles
        self.opened: dict[int, list[_T]] = {}
        self._shares = shares or Shares(_CONTENT_BYTES_MAX, errno.EMFILE)
        self._made_for: dict[int, tuple[int, int]] = {}  # uid and bytes, by handle
        self._serial = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, inode: int, opened: _T, *, own: bool = False, length: int = 0, uid: int = 0) -> int:
        """`own`: by the daemon itself. `length`: of a content. `uid`: of the user who opens it."""
        handle = inode << 1 | own
        if inode & _KIND:
            handle = self._made(inode & (_KIND | _NUMBER), serial=0)
            opened = self.get(handle) or opened  # as fixed as it was: what is told of a step may become less
        elif inode < INODES_PER_STEP:
            user = uid, max(length, _CONTENT_BYTES_LEAST)
            self._shares.take(*user)
            while handle in self.opened or not handle & _MADE:  # a serial is free: the shares end first
                self._serial = (self._serial + 1) % (1 << _SERIAL_BITS)
                handle = self._made((inode | length << _FIXED_BITS) & _NUMBER, self._serial)
            self._made_for[handle] = user
        self.put(handle, opened)
        return handle

    def check_room(self, uid: int) -> None:
        """Errno EMFILE, before the content is made, if the user may open no other one."""
        self._shares.take(uid, _CONTENT_BYTES_LEAST)
        self._shares.give_back(uid, _CONTENT_BYTES_LEAST)

    def _made(self, place: int, serial: int) -> int:
        daemon = self.generation % _GENERATIONS
        return _MADE | place | (daemon << _SERIAL_BITS | serial) << _STEP_BITS

    def put(self, handle: int, opened: _T) -> None:
        """Open under a handle that the kernel has already."""
        self.opened.setdefault(handle, []).append(opened)
        self._count += 1

    def put_once(self, handle: int, opened: _T) -> _T:
        """The same for a handle that another daemon gave, unless another request was faster: returns what is open there."""
        found = self.get(handle)
        if found is None:
            self.put(handle, opened)
        return opened if found is None else found

    def get(self, handle: int) -> _T | None:
        """The newest under this handle; None: another daemon gave it."""
        found = self.opened.get(handle)
        return found[-1] if found else None

    def pop(self, handle: int) -> _T | None:
        """The oldest under this handle, which is closed now; None: another daemon gave it."""
        found = self.opened.get(handle)
        if found is None:
            return None
        self._count -= 1
        if user := self._made_for.pop(handle, None):
            self._shares.give_back(*user)
        if len(found) == 1:
            del self.opened[handle]
        return found.pop(0)


class FileTable(Handles[OpenFile]):
    """The open files and directories of one mount, whichever namespace they were opened in."""

    def __init__(self) -> None:
        super().__init__()
        self.directories: Handles[OpenDirectory] = Handles()
        self._free_from = float("-inf")
        self._held_back = 0
        self._openers: dict[int, float] = {}  # threads that opened a slice lately, and when; the newest last

    def release(self, handle: int) -> None:
        file = self.pop(handle)
        if file is not None:
            file.close()

    def follow(self, generation: int) -> None:
        """So many daemons served this mount before."""
        self.generation = self.directories.generation = generation

    def estate(self) -> list[tuple[int, int, str | None]]:
        """What is open, and how often, for the next daemon; contents as they are. Directories are opened again."""
        return [
            (handle, len(opened), base64.b64encode(file.content).decode() if isinstance(file, OpenContent) else None)
            for handle, opened in self.opened.items()
            if not isinstance(file := opened[-1], OpenUnread)
        ]

    def entry_of(self, step: Step, index: SliceIndex) -> StepEntry | None:
        """The entry of a slice that is open here, even if it has left the log."""
        file = self.get(slice_inode(step, index) << 1)
        return file.entry if isinstance(file, OpenSlice) else None

    def in_use(self) -> bool:
        """Whether anybody but this daemon has a file or a directory open, or is held back by `close_door`."""
        others = any(handle & _MADE or not handle & 1 for handle in self.opened)
        return others or bool(self.directories or self._held_back)

    def note_opener(self, thread: int) -> None:
        self._openers.pop(thread, None)
        self._openers[thread] = trio.current_time()
        if len(self._openers) > _OPENERS_MAX:
            del self._openers[next(iter(self._openers))]

    def opened_lately(self, asking: int) -> bool:
        """Whether a process that lives, and is not the one that asks, nor above it, opened a slice within 10 s: a loader
        opens file after file, and none is open between two.
        """
        since, asks = trio.current_time() - _LATELY_S, set(lineage(asking))
        lately = [thread for thread, at in self._openers.items() if at > since]
        return any(not thread or ((found := lineage(thread)) and found[0] not in asks) for thread in lately)

    @property
    def closing(self) -> bool:
        """Whether the mount is about to end."""
        return trio.current_time() < self._free_from

    def close_door(self) -> None:
        """Hold back whoever opens a slice in the next moment: the mount is about to leave one namespace, and to end."""
        self._free_from = trio.current_time() + HELD_BACK_S

    async def pass_door(self) -> None:
        """Return once a slice may be opened."""
        while self.closing:
            self._held_back += 1
            try:
                await trio.sleep_until(self._free_from)
            finally:
                self._held_back -= 1

    def close_all(self) -> None:
        """Close all files at unmount: the kernel sends no RELEASE then."""
        for handle in list(self.opened):
            while handle in self.opened:
                self.release(handle)
