"""Names and inode numbers of steps, ranks and slices: pure functions, one name and one inode each, the same on every node.

1 … 15                        the root, `latest`, and the fixed files of `.stepfs/`
(step + 1) << 20              a step directory
(step + 1) << 20 | slice + 1  a slice; ranks that read the same slice are hard links to it
1 << 62 | step                `.stepfs/steps/<step>.json`
1 << 62 | 1 << 61 | step      `.stepfs/wait/<step>`
"""

import enum
import re
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import RANKS_MAX, SliceIndex, Step

STEP_MAX: Final = Step(2**41 - 2)  # the limit of inode numbers: 70 years at 1000 steps per second
RANK_MAX: Final = RANKS_MAX - 1
CONTROL_DIRECTORY: Final = b".stepfs"
LATEST: Final = b"latest"

_STEP: Final = re.compile(rb"step-([0-9]{9,13})")
_RANK: Final = re.compile(rb"rank-([0-9]{5,7})")
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,12}")

_SLICE_BITS: Final = 20
_SLICE_MASK: Final = (1 << _SLICE_BITS) - 1
_STEP_FILE: Final = 1 << 62
_WAIT_FILE: Final = _STEP_FILE | 1 << 61

INODES_PER_STEP: Final = 1 << _SLICE_BITS
SLICES_SERVED_MAX: Final = _SLICE_MASK  # slice + 1 must fit into the low bits


def step_name(step: Step) -> bytes:
    """The directory of a step: `step-000000042`."""
    return b"step-%09d" % step


def parse_step(name: bytes) -> Step | None:
    """Inverse of `step_name`; None for every other name."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = Step(int(match[1]))
    return step if step <= STEP_MAX and step_name(step) == name else None


def rank_name(rank: int, rest: bytes) -> bytes:
    """The file of a rank: `rank-00003.pt`."""
    return b"rank-%05d%b" % (rank, rest)


def parse_rank(name: bytes) -> tuple[int, bytes] | None:
    """Inverse of `rank_name`; None for every other name."""
    match = _RANK.match(name)
    if match is None:
        return None
    rank, rest = int(match[1]), name[match.end() :]
    return (rank, rest) if rank <= RANK_MAX and rank_name(rank, rest) == name else None


def parse_number(name: bytes) -> Step | None:
    """An unpadded step number, as in `.stepfs/wait/42`; None for every other name."""
    if _NUMBER.fullmatch(name) is None:
        return None
    step = Step(int(name))
    return step if step <= STEP_MAX else None


class Fixed(enum.IntEnum):
    """Inodes that every mount has."""

    ROOT = 1  # FUSE's own number for it
    CONTROL = 2
    STATUS = 3
    METRICS = 4
    CONFIG = 5
    ACCESSLOG = 6
    STEPS = 7
    WAIT = 8
    LATEST = 9
    ORDER = 10
    HINTED = 11  # every accepted name in `.stepfs/order/`
    LEAVE = 12
    TRACE = 13


@dataclass(frozen=True, slots=True)
class StepDirectory:
    """`step-…/`."""

    step: Step


@dataclass(frozen=True, slots=True)
class SliceFile:
    """`step-…/rank-…`: the bytes of one slice, under one name per rank that reads it."""

    step: Step
    index: SliceIndex


@dataclass(frozen=True, slots=True)
class StepFile:
    """`.stepfs/steps/<step>.json`."""

    step: Step


@dataclass(frozen=True, slots=True)
class WaitFile:
    """`.stepfs/wait/<step>`."""

    step: Step


Node = Fixed | StepDirectory | SliceFile | StepFile | WaitFile


def directory_inode(step: Step) -> int:
    assert 0 <= step <= STEP_MAX
    return (step + 1) << _SLICE_BITS


def slice_inode(step: Step, index: SliceIndex) -> int:
    assert 0 <= index < SLICES_SERVED_MAX
    return directory_inode(step) | (index + 1)


def step_file_inode(step: Step) -> int:
    return _STEP_FILE | step


def wait_file_inode(step: Step) -> int:
    return _WAIT_FILE | step


def node_of(inode: int) -> Node | None:
    """Inverse of the functions above; None for a number that none of them gives."""
    if inode >= _STEP_FILE:
        step = Step(inode & (_STEP_FILE - 1) & ~(1 << 61))
        if step > STEP_MAX or inode >= 1 << 63:
            return None
        return WaitFile(step) if inode & (1 << 61) else StepFile(step)
    if inode <= _SLICE_MASK:
        return Fixed(inode) if inode in _FIXED else None
    step = Step((inode >> _SLICE_BITS) - 1)
    if step > STEP_MAX:
        return None
    low = inode & _SLICE_MASK
    return SliceFile(step, SliceIndex(low - 1)) if low else StepDirectory(step)


_FIXED: Final = frozenset(int(fixed) for fixed in Fixed)
