"""The samples of one source that are here, and a step plan with its samples → the task of a constructor.

Groups are kept in order, and found again by the addresses that a plan gives them. A task depends on nothing but itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.payloads.columns import Taken, gathered
from stepfs_producer.payloads.step_task import NO_TOKEN, StepTask
from stepfs_producer.plan.samples import Ahead, Piece
from stepfs_producer.plan.state import SourceState
from stepfs_producer.plan.step import SPAN_COLUMNS, StepPlan
from stepfs_producer.sources.block import BlockAddress
from stepfs_producer.transforms.documents import Tokenised

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive records of a block after their transform."""

    place: BlockAddress
    first: int  # record of the block
    block_records: int
    follows: BlockAddress
    tokenised: Tokenised
    files: Integers
    offsets: Integers
    begins: Integers = field(
        init=False
    )  # where each record's tokens begin in `tokenised.ids`, and where the last's end

    def __post_init__(self) -> None:
        # Once per group, although many steps may take of it.
        begins = np.zeros(self.records + 1, np.int64)
        np.cumsum(np.maximum(self.tokenised.lengths, 0), out=begins[1:])
        object.__setattr__(self, "begins", begins)

    @property
    def records(self) -> int:
        return len(self.tokenised.lengths)

    @property
    def tokens(self) -> int:
        return len(self.tokenised.ids)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        optional = (self.tokenised.mask, self.tokenised.columns)
        beside = sum(0 if one is None else one.nbytes for one in optional)
        return self.tokenised.ids.nbytes + 4 * 8 * self.records + beside

    def piece(self, first: int, last: int) -> Piece:
        """The metadata that the planner sees, of records `first` … `last` - 1 of the group."""
        lengths, columns = self.tokenised.lengths[first:last], self.tokenised.columns
        rows = None if columns is None else columns.counts[first:last]
        return Piece(*self.place, self.block_records, self.first + first, lengths, self.follows, rows)


class SampleBuffer:
    """The groups of one source from its cursor on."""

    def __init__(self) -> None:
        self.groups: deque[Group] = deque()
        self.ended = False  # nothing follows the groups
        self.tokens = 0
        self.nbytes = 0
        self._here = BlockAddress(0, 0, 0)
        self._taken = 0

    def add(self, group: Group) -> None:
        """The next group."""
        self.groups.append(group)
        self.tokens += group.tokens
        self.nbytes += group.nbytes

    def ahead(self, tokens: int) -> tuple[Ahead, bool]:
        """For the planner: as many records from the cursor on as have at most so many tokens, and whether these are all.

        It does not change later.
        """
        pieces: list[Piece] = []
        left = tokens
        for group in self.groups:
            first = self._taken - group.first if not pieces and group.place == self._here else 0
            first = min(max(first, 0), group.records)
            begins = group.begins
            if int(begins[-1] - begins[first]) > left:
                last = int(np.searchsorted(begins, begins[first] + left, side="right")) - 1
                pieces.append(group.piece(first, last))
                return Ahead(pieces), False
            pieces.append(group.piece(first, group.records))
            left -= int(begins[-1] - begins[first])
        return Ahead(pieces, self.ended), True

    def until(self, cursor: SourceState) -> tuple[Group, ...]:
        """The groups of which a step may take that ends at `cursor`."""
        end = (BlockAddress(cursor.epoch, cursor.fragment, cursor.block), cursor.taken)
        return tuple(takewhile(lambda group: (group.place, group.first) <= end, self.groups))

    def forget_before(self, cursor: SourceState) -> None:
        """Drop the groups that lie wholly before the cursor."""
        self._here = here = BlockAddress(cursor.epoch, cursor.fragment, cursor.block)
        self._taken = cursor.taken
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
class GatheredTokens:
    """The tokens of the spans of a step, end to end, with their masks, successors and places."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8] | None
    following: NDArray[np.int32]  # per span; NO_TOKEN at the end of its document
    following_mask: NDArray[np.uint8] | None
    files: Integers  # per span
    offsets: Integers
    columns: list[Taken] = field(default_factory=list)

    @classmethod
    def room_for(cls, spans: int, tokens: int, *, masked: bool) -> GatheredTokens:
        """To be filled by `gather`."""
        return cls(
            np.empty(tokens, np.int32),
            np.ones(tokens, np.uint8) if masked else None,
            np.full(spans, NO_TOKEN, np.int32),
            np.ones(spans, np.uint8) if masked else None,
            np.empty(spans, np.int64),
            np.empty(spans, np.int64),
        )


def task_of(plan: StepPlan, groups: Mapping[str, tuple[Group, ...]]) -> StepTask:
    """The task of `plan`. `groups`: per source, everything from the cursor before the step to the one behind it."""
    spans = plan.spans
    counts = spans[:, 4]
    ends = np.cumsum(counts)
    masked = any(one.tokenised.mask is not None for of_source in groups.values() for one in of_source)
    found = GatheredTokens.room_for(len(spans), int(ends[-1]) if len(ends) else 0, masked=masked)
    for index, name in enumerate(plan.sources):
        mine = np.flatnonzero(spans[:, 5] == index)
        addresses = spans[mine][:, [6, 7, 8, 9, 10, 4]]
        gather(groups[name], addresses, mine, ends[mine] - counts[mine], found)
    columns = gathered(len(spans), found.columns)
    rows = spans[:, len(SPAN_COLUMNS) :]
    assert np.array_equal(rows, np.zeros_like(rows) if columns is None else columns.counts), (
        "columns stay with their tokens"  # hazard P17
    )
    return StepTask(
        plan.shape,
        plan.sequence_length,
        plan.sources,
        np.column_stack([spans[:, :7], found.files, found.offsets, spans[:, 10]]),
        found.ids,
        found.following,
        found.mask,
        found.following_mask,
        columns,
    )


def gather(
    groups: Sequence[Group], addresses: Integers, spans: Integers, places: Integers, found: GatheredTokens
) -> None:
    """Fill in some spans of one source.

    `addresses`: [n, 6] of epoch, fragment, block, record, first token, tokens, all of them in `groups`; `spans`: their
    numbers in `found`; `places`: where their tokens belong in it.
    """
    left = len(spans)
    for group in groups:
        record = addresses[:, 3] - group.first
        inside = (record >= 0) & (record < group.records)
        mine = np.flatnonzero((addresses[:, :3] == np.array(group.place)).all(axis=1) & inside)
        left -= len(mine)
        if len(mine):
            _gather_of(group, record[mine], addresses[mine, 4:6], spans[mine], places[mine], found)
    assert not left, "every span lies in a group"


def _gather_of(
    group: Group, record: Integers, taken: Integers, spans: Integers, places: Integers, found: GatheredTokens
) -> None:
    ids, mask = group.tokenised.ids, group.tokenised.mask
    start = group.begins[record] + taken[:, 0]
    after = start + taken[:, 1]
    goes_on = after < group.begins[record + 1]
    found.following[spans[goes_on]] = ids[after[goes_on]]
    found.files[spans], found.offsets[spans] = group.files[record], group.offsets[record]
    if group.tokenised.columns is not None:
        found.columns.append(Taken(group.tokenised.columns, record, spans))
    # Slices: indices of all tokens would cost more than their copies.
    for place, begin, count in zip(places.tolist(), start.tolist(), taken[:, 1].tolist(), strict=True):
        found.ids[place : place + count] = ids[begin : begin + count]
        if mask is not None and found.mask is not None:
            found.mask[place : place + count] = mask[begin : begin + count]
    if mask is not None and found.following_mask is not None:
        found.following_mask[spans[goes_on]] = mask[after[goes_on]]
