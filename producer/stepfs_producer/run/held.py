"""The samples of one source that are here: groups in order, found again by the address that a plan gives them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.samples import Ahead, Piece
from stepfs_producer.plan.state import SourceState
from stepfs_producer.sources.block import Place
from stepfs_producer.transforms.tokenised import Tokenised

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive records of a block after their transform."""

    place: Place
    first: int  # record of the block
    block_records: int
    follows: Place
    tokenised: Tokenised
    files: Integers
    offsets: Integers

    @property
    def records(self) -> int:
        return len(self.tokenised.lengths)

    @property
    def tokens(self) -> int:
        return len(self.tokenised.ids)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        mask = self.tokenised.mask
        return self.tokenised.ids.nbytes + 3 * 8 * self.records + (0 if mask is None else mask.nbytes)

    def piece(self) -> Piece:
        """The metadata that the planner sees."""
        return Piece(*self.place, self.block_records, self.first, self.tokenised.lengths, self.follows)


class Held:
    """The groups of one source from its cursor on."""

    def __init__(self) -> None:
        self.groups: deque[Group] = deque()
        self.ended = False  # nothing follows the groups
        self.tokens = 0
        self.nbytes = 0

    def add(self, group: Group) -> None:
        """The next group."""
        self.groups.append(group)
        self.tokens += group.tokens
        self.nbytes += group.nbytes

    def ahead(self) -> Ahead:
        """For the planner. What it holds does not change afterwards."""
        return Ahead(tuple(group.piece() for group in self.groups), self.ended)

    def forget_before(self, cursor: SourceState) -> None:
        """Drop the groups that lie wholly before the cursor."""
        here = Place(cursor.epoch, cursor.fragment, cursor.block)
        while self.groups:
            group = self.groups[0]
            ends = group.first + group.records
            if group.place > here or (
                group.place == here and (ends > cursor.taken or not group.block_records)
            ):
                return
            self.groups.popleft()
            self.tokens -= group.tokens
            self.nbytes -= group.nbytes


@dataclass(frozen=True, slots=True)
class Gathered:
    """The tokens of some spans of one source, end to end."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8] | None
    following: NDArray[np.int32]  # per span; NO_TOKEN at the end of its document
    following_mask: NDArray[np.uint8] | None
    files: Integers  # per span
    offsets: Integers


def gather(groups: tuple[Group, ...], spans: Integers, no_token: int) -> Gathered:
    """`spans`: [n, 6] of epoch, fragment, block, record, first token, tokens; all of them are in `groups`."""
    place_of: dict[Place, int] = {}
    lengths = np.concatenate([np.maximum(group.tokenised.lengths, 0) for group in groups])
    ids = np.concatenate([group.tokenised.ids for group in groups])
    begins = np.concatenate(([0], np.cumsum(lengths)))
    base = 0
    for group in groups:
        place_of.setdefault(group.place, base - group.first)
        base += group.records
    record = spans[:, 3].copy()
    for place, begin in place_of.items():
        mine = (spans[:, :3] == np.array(place, np.int64)).all(axis=1)
        record[mine] += begin
    start = begins[record] + spans[:, 4]
    counts = spans[:, 5]
    ends = np.cumsum(counts)
    at = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + np.repeat(
        start - (ends - counts), counts
    )
    after = start + counts
    goes_on = after < begins[record + 1]
    following = np.full(len(spans), no_token, np.int32)
    following[goes_on] = ids[after[goes_on]]
    mask = following_mask = None
    if any(group.tokenised.mask is not None for group in groups):
        whole = np.concatenate([_mask_of(group) for group in groups])
        mask = whole[at]
        following_mask = np.zeros(len(spans), np.uint8)
        following_mask[goes_on] = whole[after[goes_on]]
    files = np.concatenate([group.files for group in groups])[record]
    offsets = np.concatenate([group.offsets for group in groups])[record]
    return Gathered(ids[at], mask, following, following_mask, files, offsets)


def _mask_of(group: Group) -> NDArray[np.uint8]:
    mask = group.tokenised.mask
    return np.ones(group.tokens, np.uint8) if mask is None else mask
