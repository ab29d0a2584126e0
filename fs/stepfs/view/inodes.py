"""Inode numbers of steps and slices: computed, the same on every node and after every restart.

1 … 15                        the root, `latest`, and the fixed files of `.stepfs/`
(step + 1) << 20              a step directory
(step + 1) << 20 | slice + 1  a slice; ranks that read the same slice are hard links to it
1 << 62 | step                `.stepfs/steps/<step>.json`
1 << 62 | 1 << 61 | step      `.stepfs/wait/<step>`
"""

import enum
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import SliceIndex, Step

STEP_MAX: Final = Step(2**41 - 2)  # 70 years at 1000 steps per second

_SLICE_BITS: Final = 20
_SLICE_MASK: Final = (1 << _SLICE_BITS) - 1
_STEP_FILE: Final = 1 << 62
_WAIT_FILE: Final = _STEP_FILE | 1 << 61

INODES_PER_STEP: Final = 1 << _SLICE_BITS
SLICES_SERVED_MAX: Final = _SLICE_MASK  # slice + 1 must fit into the low bits


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
