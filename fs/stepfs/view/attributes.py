"""The results of `stat`, as constants of a commit: changed attributes would make the kernel drop its page cache.

Directories whose number of children changes have link count 1, which tools read as "unknown" (as on btrfs), so that
no tool relies on it.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import SEGMENT_STEPS, SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.view.inodes import Fixed, directory_inode, slice_inode
from stepfs.view.names import step_name
from stepfs.view.tree import Presence, StepTable, Tree

FOREVER_S: Final = 10.0 * 365 * 86400
GLANCE_S: Final = 1.0  # for the root and `.stepfs/`: one GETATTR a second instead of one per path walk
BLOCK_BYTES_HINT: Final = 64 << 10  # st_blksize: the size of a stdio or Python read buffer

DIRECTORY_MODE: Final = stat.S_IFDIR | 0o555
FILE_MODE: Final = stat.S_IFREG | 0o444
LINK_MODE: Final = stat.S_IFLNK | 0o777


@dataclass(frozen=True, slots=True)
class Attributes:
    """One inode's attributes, and the seconds for which the kernel may cache them and the name."""

    inode: int
    mode: int
    nlink: int
    size: int
    time_ms: int
    keep_s: float


def root(table: StepTable) -> Attributes:
    """The root: as old as the newest commit, or before the first as the lake."""
    time_ms = table.state.time_ms if table.state.version >= 0 else table.identity.created_ms
    return Attributes(Fixed.ROOT, DIRECTORY_MODE, 1, 0, time_ms, GLANCE_S)


def step_directory(table: StepTable, tree: Tree, step: Step) -> Attributes:
    """A step's directory; a pending one may change at any moment, so the kernel caches nothing of it."""
    presence = tree.presence(step)
    if presence is Presence.COMMITTED:
        return Attributes(directory_inode(step), DIRECTORY_MODE, 2, 0, table.time_ms(step), FOREVER_S)
    return Attributes(directory_inode(step), DIRECTORY_MODE, 2, 0, table.identity.created_ms, 0.0)


def runs_of_one_time(table: StepTable, steps: range) -> Iterator[tuple[range, int]]:
    """Live steps as runs of equal `time_ms`, with that time: a whole segment if it is not loaded."""
    first = steps.start
    while first < steps.stop:
        stop = first + 1
        if first < table.state.sealed_steps and table.entry_if_loaded(Step(first)) is None:
            stop = min(steps.stop, (first // SEGMENT_STEPS + 1) * SEGMENT_STEPS)
        yield range(first, stop), table.time_ms(Step(first))
        first = stop


def slice_file(entry: StepEntry, index: SliceIndex, links: int) -> Attributes:
    """A rank's file: exact size, the time of its commit, for ever."""
    return Attributes(
        slice_inode(entry.step, index), FILE_MODE, links, entry.tgb.length(index), entry.time_ms, FOREVER_S
    )


def pending_file(table: StepTable, step: Step, index: SliceIndex, links: int) -> Attributes:
    """A rank's file of a step that is not committed yet: size 0, and the kernel caches nothing of it."""
    return Attributes(slice_inode(step, index), FILE_MODE, links, 0, table.identity.created_ms, 0.0)


def latest(table: StepTable, step: Step) -> Attributes:
    """The symlink to the newest step; never cached, because it moves with every commit."""
    return Attributes(Fixed.LATEST, LINK_MODE, 1, len(step_name(step)), table.time_ms(step), 0.0)


def control(inode: int, time_ms: int, *, keep_s: float = FOREVER_S, mode: int = FILE_MODE) -> Attributes:
    """A file or directory of `.stepfs/`. Its size is 0 like that of a file of /proc: opening it makes its content."""
    return Attributes(inode, mode, 1, 0, time_ms, keep_s)
