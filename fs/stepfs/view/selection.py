"""Which steps and ranks a view is about, in the words of the options: parsed here, checked against a lake here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepfs.errors import RefusedError, UsageError
from stepfs.format.ids import SliceIndex, Step
from stepfs.view.names import RANK_MAX, STEP_MAX
from stepfs.view.ranks import RankMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepfs.format.snapshot import LogState


def parse_steps(text: str) -> range:
    """`A:B` → steps A … B-1."""
    first, colon, end = text.partition(":")
    if not (colon and _is_number(first) and _is_number(end)) or not int(first) < int(end) <= STEP_MAX + 1:
        raise UsageError(f"--steps {text!r}: write A:B with A < B, for example 0:1000 (B is not included)")
    return range(Step(int(first)), Step(int(end)))


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0-3,8` → (0, 1, 2, 3, 8); both ends included."""
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)) or not int(first) <= int(last) <= RANK_MAX:
            raise UsageError(f"--ranks {text!r}: write ranks and ranges such as 0-7 or 0,2,4-5 (both ends included)")
        ranks.update(range(int(first), int(last) + 1))
    return tuple(sorted(ranks))


def hinted_slices(
    hinted: tuple[int, ...], ranks: RankMap, files: Sequence[int] | None = None
) -> tuple[SliceIndex, ...]:
    """The slices that these ranks (`--ranks`, ascending) read: of these files, by default of all."""
    if hinted and hinted[-1] >= ranks.world:
        raise UsageError(f"--ranks names rank {hinted[-1]}, but there are {ranks.world} ranks (0 to {ranks.world - 1})")
    return tuple(sorted({index for rank in hinted for index in ranks.slices_of(rank, files)}))


def check_steps(steps: range | None, state: LogState) -> None:
    """`RefusedError` for steps that will never come: a reader would find them absent after hours of training."""
    if steps is not None and state.sealed and steps.stop > state.next_step:
        advice = (
            f"Mount at most --steps {steps.start}:{state.next_step}"
            if steps.start < state.next_step
            else "Name steps that it has"
            if state.next_step
            else "Name another lake"
        )
        raise RefusedError(
            f"--steps {steps.start}:{steps.stop}: the lake is sealed and has {state.next_step} steps; no more will come. "
            f"{advice}"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15
