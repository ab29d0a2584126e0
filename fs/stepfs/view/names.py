"""Names of steps and ranks: pure functions, one name each, the same on every node."""

import re
from typing import Final

from stepfs.format.ids import RANKS_MAX, Step
from stepfs.view.inodes import STEP_MAX

RANK_MAX: Final = RANKS_MAX - 1
CONTROL_DIRECTORY: Final = b".stepfs"
LATEST: Final = b"latest"

_STEP: Final = re.compile(rb"step-([0-9]{9,13})")
_RANK: Final = re.compile(rb"rank-([0-9]{5,7})")
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,12}")


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
