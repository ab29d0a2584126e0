"""The known samples of one source, and a step plan with its samples → the spans of a constructor's task.

Groups are kept in order, and found by the addresses in a plan. Only their lengths are here; their bodies are with the
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.engine.kept import KeptBody
from stepfs_producer.payloads.step_task import StepSpans
from stepfs_producer.plan.samples import Ahead, Piece
from stepfs_producer.plan.step import SPAN_COLUMNS, SourceState, StepPlan
from stepfs_producer.sources.block import BlockAddress

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive records of a block after their transform."""

    place: BlockAddress
    first: int  # record of the block
    block_records: int
    follows: BlockAddress
    lengths: Integers
    body: KeptBody | None  # None: no records. The group holds it
    columns: Integers | None = None  # [records, columns]: rows that each has beside its tokens
    begins: Integers = field(init=False)  # tokens before each record, and all of them

    def __post_init__(self) -> None:
        # Once per group, although many steps may take of it.
        begins = np.zeros(self.records + 1, np.int64)
        np.cumsum(np.maximum(self.lengths, 0), out=begins[1:])
        object.__setattr__(self, "begins", begins)

    @property
    def records(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.begins[-1])

    @property
    def nbytes(self) -> int:
        columns = 0 if self.columns is None else self.columns.nbytes
        return (0 if self.body is None else self.body.nbytes) + 2 * self.lengths.nbytes + columns

    def piece(self, first: int, last: int) -> Piece:
        """Records `first` … `last` - 1 of the group, for the planner."""
        lengths = self.lengths[first:last]
        rows = None if self.columns is None else self.columns[first:last]
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
        self.groups.append(group)
        self.tokens += group.tokens
        self.nbytes += group.nbytes

    def ahead(self, tokens: int) -> tuple[Ahead, bool]:
        """For the planner: the records from the cursor on with at most so many tokens, and whether these are all."""
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
        """The groups of a step that ends at `cursor`."""
        end = (BlockAddress(cursor.epoch, cursor.fragment, cursor.block), cursor.taken)
        return tuple(takewhile(lambda group: (group.place, group.first) <= end, self.groups))

    def forget_before(self, cursor: SourceState) -> None:
        """Drop the groups that lie wholly before the cursor."""
        self._here = here = BlockAddress(cursor.epoch, cursor.fragment, cursor.block)
        self._taken = cursor.taken
        while self.groups:
            group = self.groups[0]
            ends = group.first + group.records
            if group.place > here or (group.place == here and (ends > cursor.taken or not group.block_records)):
                return
            self.groups.popleft()
            if group.body is not None:
                group.body.let_go()
            self.tokens -= group.tokens
            self.nbytes -= group.nbytes


def spans_of(plan: StepPlan, groups: Mapping[str, Sequence[Group]]) -> tuple[StepSpans, tuple[KeptBody, ...]]:
    """The task of `plan`, and the bodies that its spans number. `groups`: per source, everything from the cursor before the
    step to the one behind it.
    """
    spans = plan.spans
    placed = np.column_stack([spans[:, :7], np.zeros((len(spans), 2), np.int64), spans[:, 10]])
    bodies: list[KeptBody] = []
    for index, name in enumerate(plan.sources):
        mine = np.flatnonzero(spans[:, 5] == index)
        group, record = _found(groups[name], spans[mine, 6:10])
        used, number = np.unique(group, return_inverse=True)
        placed[mine, 7], placed[mine, 8] = number + len(bodies), record
        for one in used.tolist():
            body = groups[name][one].body
            assert body is not None
            bodies.append(body)
    rows = spans[:, len(SPAN_COLUMNS) :]
    return StepSpans(plan.shape, plan.sequence_length, plan.sources, placed, rows), tuple(bodies)


def _found(groups: Sequence[Group], addresses: Integers) -> tuple[Integers, Integers]:
    """The group of each record, and its number in the group. `addresses`: [n, 4] of epoch, fragment, block, record."""
    begins = np.array([(*group.place, group.first) for group in groups], np.int64).reshape(-1, 4)
    merged = np.concatenate([begins, addresses])
    order = np.lexsort(merged.T[::-1])  # stable: a group goes before its first record
    before = np.empty(len(merged), np.int64)
    before[order] = np.cumsum(order < len(begins))
    group = before[len(begins) :] - 1
    record = addresses[:, 3] - begins[group, 3]
    records = np.array([one.records for one in groups], np.int64)
    assert (group >= 0).all(), "every span lies in a group"
    assert (begins[group, :3] == addresses[:, :3]).all()
    assert (record < records[group]).all()
    return group, record
