"""Open directories: pure memory, resumable at any entry, stable while steps come and go.

An entry's id is a function of its name, and listings are in order of ids, so a reader that comes back with an id
continues right behind it. The range of steps is fixed when a listing starts from the beginning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyfuse3

from stepfs.format.ids import SliceIndex, Step
from stepfs.mount.fuse.kernel import LookupCounts
from stepfs.view import attributes
from stepfs.view.attributes import BLOCK_BYTES_HINT, Attributes
from stepfs.view.names import CONTROL_DIRECTORY, INODES_PER_STEP, LATEST, directory_inode, step_file_inode, step_name
from stepfs.view.ranks import FileNames
from stepfs.view.tree import StepTable, Tree

NS_PER_MS: Final = 1_000_000
_SECTOR_BYTES: Final = 512


class Replies:
    """From the view's attributes to pyfuse3's structures; the mounting user owns every file."""

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


_FIRST_STEP_ID: Final = 3

ReaddirReply = Callable[[pyfuse3.ReaddirToken, bytes, pyfuse3.EntryAttributes, int], bool]


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
    """The root: `.stepfs`, under `--list-latest` `latest`, and the steps. Counts the lookups that it gives to the
    kernel."""

    table: StepTable
    tree: Tree
    control: Attributes
    known: LookupCounts
    shown: range = range(0)
    latest: Step | None = None

    def list_after(self, after: int, rows: Rows) -> None:
        if after == 0:
            self.shown = self.tree.listed()
            self.latest = self.tree.latest() if self.tree.options.list_latest else None
        if after < 1 and not rows.add(1, CONTROL_DIRECTORY, self.control):
            return
        newest = self.latest if after < 2 else None
        if newest is not None and not self.tree.readable(newest):
            newest = None
        if newest is not None and not rows.add(2, LATEST, attributes.latest(self.table, newest)):
            return
        steps = self._steps(after)
        end = self._list_steps(steps, rows)
        self.known.add_range(Step(steps.start), Step(end))

    def _steps(self, after: int) -> range:
        first = max(self.shown.start, after - _FIRST_STEP_ID + 1)
        if self.tree.options.steps is None:
            # The kernel must not get steps again that have left the view since the listing began.
            first = max(first, self.tree.first_visible())
        return range(first, max(first, self.shown.stop))

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
    shown: range = range(0)

    def list_after(self, after: int, rows: Rows) -> None:
        if after == 0:
            self.shown = self.tree.listed()
        for step in map(Step, range(max(self.shown.start, after), self.shown.stop)):
            if self.tree.readable(step):
                found = attributes.control(step_file_inode(step), self.table.time_ms(step), keep_s=0.0)
                if not rows.add(step + 1, b"%d.json" % step, found):
                    return
