"""Slices larger than the budget: blocks that their reader has passed make room for those that it reads next.

All blocks of an open slice are pinned. When together they are more than the budget, a reader that is blocked could take
one at a time, and one GET was in flight. Reading ahead may take two kinds of pinned blocks: those behind their reader,
and those that are reached later than the block it asks for. How far it may reach doubles with every block that was read
in order, as TCP's window does, because a reader that jumps leaves the fetched blocks unread.

Rejected: a window of fixed size for large slices. It would hold a slice that fits back as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stepfs.data.blocks import Block, HeldSlice, State

_REACH_SHIFT_MAX: Final = 8


def find_passed(asking: Block, slices: Iterable[HeldSlice]) -> Block | None:
    """The pinned block that is read last, if that is later than `asking`; its one slice is `PASSED` once it has gone."""
    distance = 0 if asking.waiting else _distance(asking)
    if distance is None:
        return None
    found: Block | None = None
    rank = (False, distance)  # blocks behind a reader leave first, then those farthest ahead
    for held in slices:
        if not held.role.pinned or len(held.places) < 2 or held.read_at == float("-inf"):
            continue  # of files that were opened and not read, the bytes are promised
        for number, block in enumerate(held.places):
            if block is None or block.state is not State.READY or block.waiting or len(block.owners) > 1:
                continue
            ahead = number - held.reading
            if (ahead < 0, abs(ahead)) > rank:
                found, rank = block, (ahead < 0, abs(ahead))
    return found


def _distance(asking: Block) -> int | None:
    """Blocks from the reader to `asking`; None where reading ahead may use free memory only."""
    if not asking.pinned:
        return None
    ahead = asking.range.pieces[0].block - min(owner.reading for owner in asking.owners)
    streak = min(_REACH_SHIFT_MAX, *(owner.streak for owner in asking.owners))
    return ahead if 0 <= ahead < 1 << streak + 1 else None
