"""Bringing the samples of one source in: groups of records are made side by side, and kept in order from its cursor on.

Groups are kept in order, and found by the addresses in a plan. Only their heads come here, which have the lengths; records
and samples are bodies that stay with the engine. A block's is held until its last group is made.

Three tasks per source: one reads blocks, one ahead of the block that is being transformed; one submits groups; one waits
for them in order. The first two stop at the marks, which follow the source's share of the work of the coming steps.
Number, size and timing of the groups never show in the sample buffer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import trio

from stepfs.errors import RefusedError
from stepfs_producer.engine.retry import KeptBody, TaskRunner, WorkersDiedError
from stepfs_producer.payloads.step import StepSpans
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.samples import Ahead, BlockHead, Heads, Piece
from stepfs_producer.plan.spans import Gathered, Span
from stepfs_producer.plan.step import SourceState, StepPlan
from stepfs_producer.run.read_ahead import Work
from stepfs_producer.run.workers.tasks import GroupHead, read, record_place, transform
from stepfs_producer.sources.listing import Layout
from stepfs_producer.sources.record import SourceSpec
from stepfs_producer.transforms.documents import TransformSpec

OnLoad = Callable[[str, int, int], None]  # of every group brought in: source, tokens, those that the loss looks at
OnSkip = Callable[[str, int, int, str], None]  # of every bad record brought in: source, file number, offset, reason
_Block = tuple[BlockHead, KeptBody]


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """Consecutive records of a block after their transform."""

    block: BlockHead
    first: int  # record of the block
    heads: Heads
    body: KeptBody | None  # None: no records. The group holds it
    begins: Integers = field(init=False)  # tokens before each record, and all of them

    def __post_init__(self) -> None:
        # Once per group, although many steps may take of it.
        begins = np.zeros(self.records + 1, np.int64)
        np.cumsum(np.maximum(self.heads.tokens, 0), out=begins[1:])
        object.__setattr__(self, "begins", begins)

    @property
    def records(self) -> int:
        return len(self.heads.tokens)

    @property
    def tokens(self) -> int:
        return int(self.begins[-1])

    @property
    def nbytes(self) -> int:
        return (0 if self.body is None else self.body.nbytes) + self.begins.nbytes + self.heads.nbytes

    def piece(self, first: int, last: int) -> Piece:
        """Records `first` … `last` - 1 of the group, for the planner."""
        return Piece(self.block, self.first + first, self.heads.part(first, last))


class SampleBuffer:
    """The groups of one source from its cursor on."""

    def __init__(self) -> None:
        self.groups: deque[SampleChunk] = deque()
        self.ended = False  # nothing follows the groups
        self.tokens = 0
        self.nbytes = 0
        self._here = BlockAddress(0, 0, 0)
        self._taken = 0

    def add(self, group: SampleChunk) -> None:
        self.groups.append(group)
        self.tokens += group.tokens
        self.nbytes += group.nbytes

    def ahead(self, tokens: int) -> tuple[Ahead, bool]:
        """The records from the cursor on with at most so many tokens, as the planner takes them, and whether these are all."""
        pieces: list[Piece] = []
        left = tokens
        for group in self.groups:
            first = self._taken - group.first if not pieces and group.block.place == self._here else 0
            first = min(max(first, 0), group.records)
            begins = group.begins
            if int(begins[-1] - begins[first]) > left:
                last = int(np.searchsorted(begins, begins[first] + left, side="right")) - 1
                pieces.append(group.piece(first, last))
                return Ahead(pieces), False
            pieces.append(group.piece(first, group.records))
            left -= int(begins[-1] - begins[first])
        return Ahead(pieces, self.ended), True

    def until(self, cursor: SourceState) -> tuple[SampleChunk, ...]:
        """The groups of a step that ends at `cursor`."""
        end = (BlockAddress(cursor.epoch, cursor.fragment, cursor.block), cursor.taken)
        return tuple(takewhile(lambda group: (group.block.place, group.first) <= end, self.groups))

    def forget_before(self, cursor: SourceState) -> None:
        """Drop the groups that lie wholly before the cursor."""
        self._here = here = BlockAddress(cursor.epoch, cursor.fragment, cursor.block)
        self._taken = cursor.taken
        while self.groups:
            group = self.groups[0]
            ends = group.first + group.records
            place = group.block.place
            if place > here or (place == here and (ends > cursor.taken or not group.block.records)):
                return
            self.groups.popleft()
            if group.body is not None:
                group.body.let_go()
            self.tokens -= group.tokens
            self.nbytes -= group.nbytes


def spans_of(plan: StepPlan, groups: Mapping[str, Sequence[SampleChunk]]) -> tuple[StepSpans, tuple[KeptBody, ...]]:
    """The task of `plan`, and the bodies that its spans number. `groups`: per source, everything from the cursor before the
    step to the one behind it.
    """
    spans = plan.spans
    placed = np.column_stack([spans[:, : Gathered.GROUP], np.zeros((len(spans), 2), np.int64), spans[:, Span.FIRST]])
    bodies: list[KeptBody] = []
    for index, name in enumerate(plan.sources):
        mine = np.flatnonzero(spans[:, Span.SOURCE] == index)
        group, record = _found(groups[name], spans[mine, Span.EPOCH : Span.FIRST])
        used, number = np.unique(group, return_inverse=True)
        placed[mine, Gathered.GROUP], placed[mine, Gathered.RECORD] = number + len(bodies), record
        for one in used.tolist():
            body = groups[name][one].body
            assert body is not None
            bodies.append(body)
    rows = spans[:, len(Span) :]
    return StepSpans(plan.shape, plan.sequence_length, plan.sources, placed, rows), tuple(bodies)


def _found(groups: Sequence[SampleChunk], addresses: Integers) -> tuple[Integers, Integers]:
    """The group of each record, and its number in the group. `addresses`: [n, 4] of epoch, fragment, block, record."""
    begins = np.array([(*group.block.place, group.first) for group in groups], np.int64).reshape(-1, 4)
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


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source with its transform and its layout."""

    spec: SourceSpec
    transform: TransformSpec
    layout: Layout


class SourceLoader:
    """The samples of one source, ahead of the planner."""

    def __init__(
        self,
        source: LoadedSource,
        tasks: TaskRunner,
        *,
        changed: Callable[[], None],
        skipped: OnSkip,
        loaded: OnLoad = lambda _source, _tokens, _learned: None,
    ) -> None:
        self.held = SampleBuffer()
        self.reading = False  # a block is being read
        self.under_way = 0  # groups, those included that wait for an older one
        self.work = Work()
        self.added = 0  # groups so far
        self.block_bytes = 0  # of the blocks that are here
        self._source = source
        self._tasks = tasks
        self._changed = changed
        self._skipped = skipped
        self._loaded = loaded
        self._wanted_tokens = 1
        self._starved = False
        self._epoch_tokens = 0
        self._whole_epoch = False  # since the run began
        self._parallel = 1
        self._transforming = 0  # groups
        self._wake = trio.Event()
        self._doing: list[str] = []  # tasks under way, oldest first

    @property
    def doing(self) -> str:
        """Its oldest task under way, in words; empty if there is none."""
        return self._doing[0] if self._doing else ""

    @property
    def name(self) -> str:
        return self._source.spec.name

    def want(self, *, tokens: int, parallel: int) -> None:
        """Keep so many tokens ahead, with at most so many groups in their transform."""
        if (tokens, parallel) != (self._wanted_tokens, self._parallel):
            self._wanted_tokens, self._parallel = tokens, parallel
            self._notice()

    def need(self) -> None:
        """The planner waits: bring at least one group, even above the marks."""
        self._starved = True
        self._notice()

    def advance(self, cursor: SourceState) -> None:
        self.held.forget_before(cursor)
        self._notice()

    async def run(self, start: SourceState) -> None:
        """Load from the cursor of `start` on until the source ends, or for ever."""
        sender, receiver = trio.open_memory_channel[_Block](0)  # one block read ahead of the one in use
        # In this order: an error ends the reader first.
        async with sender, receiver, trio.open_nursery() as nursery:
            nursery.start_soon(self._read_blocks, start, sender.clone())
            await sender.aclose()
            slots, in_order = trio.open_memory_channel[_Slot](math.inf)  # the marks bound it
            nursery.start_soon(self._submit_groups, receiver, start.taken, slots, nursery)
            async for slot in in_order:
                await slot.done.wait()
                self.under_way -= 1
                self._add(slot)
                self._notice()
        self.held.ended = True
        self._changed()

    async def _read_blocks(self, start: SourceState, sender: trio.MemorySendChannel[_Block]) -> None:
        place = BlockAddress(start.epoch, start.fragment, start.block)
        self._whole_epoch = place[1:] == (0, 0) and not start.taken
        async with sender:
            # In a thread: the order of an epoch of 10⁵ fragments takes a second.
            while (task := await trio.to_thread.run_sync(self._source.layout.task, place)) is not None:
                await self._until(self._wants_more)
                self.reading = True
                files = ", ".join(sorted({self._file(one.file) for one in task.fragments})[:3])
                what = f"reading block {tuple(place)} of {files}"
                with self._under_way(what):
                    head, body = await self._tasks.keep(
                        f"source {self.name}: {what}", self.name, read, self._source.spec, task
                    )
                self.reading = False
                self.block_bytes += body.nbytes
                await sender.send((head, body))
                place = head.follows
                if head.ended:
                    return

    async def _submit_groups(
        self,
        blocks: trio.MemoryReceiveChannel[_Block],
        first: int,
        slots: trio.MemorySendChannel[_Slot],
        nursery: trio.Nursery,
    ) -> None:
        with slots:
            async for block, body in blocks:
                if first >= block.records:
                    slot = _Slot(block, first, block.records)
                    slot.done.set()
                    slots.send_nowait(slot)
                    self.under_way += 1
                while first < block.records:
                    await self._until(lambda: self._transforming < self._parallel and self._wants_more())
                    last = min(first + self.work.group_records, block.records)
                    slot = _Slot(block, first, last)
                    slots.send_nowait(slot)
                    self.under_way += 1
                    self._transforming += 1
                    body.hold()
                    nursery.start_soon(self._transform_group, slot, body)
                    first = last
                self.block_bytes -= body.nbytes
                body.let_go()
                first = 0

    async def _transform_group(self, slot: _Slot, records: KeptBody) -> None:
        block = slot.block
        what = f"transforming records {slot.first} to {slot.last - 1} of block {tuple(block.place)}"
        shared = (self._source.transform, self._source.spec.seed, block.place.epoch, self.name, records)
        try:
            with self._under_way(what):
                slot.head, slot.body = await self._tasks.keep(
                    f"source {self.name}: {what}", self.name, transform, *shared, slot.first, slot.last
                )
        except WorkersDiedError as error:
            index = await self._tasks.culprit(slot.first, slot.last, transform, *shared)
            if index is None:
                raise
            file, offset = await self._tasks.carry_out("finding a record", self.name, record_place, records, index)
            raise WorkersDiedError(
                f"source {self.name}: every worker dies of the record at {offset} of {self._file(file)} (record {index} of "
                f"block {tuple(block.place)}); remove the record, or repair the function or library that fails on it"
            ) from error
        records.let_go()
        self.work.note(slot.last - slot.first, slot.tokens, slot.head.seconds, slot.body.nbytes)
        self._transforming -= 1
        slot.done.set()
        self._notice()

    def _refuse_empty_epochs(self, block: BlockHead, tokens: int) -> None:
        """A source whose records are all blank, bad or dropped would be read for ever."""
        self._epoch_tokens += tokens
        if block.follows.epoch == block.place.epoch:
            return
        if not self._epoch_tokens and self._whole_epoch and not block.ended:
            raise RefusedError(
                f"source {self.name}: a whole epoch of it gave no sample (all its records are empty, bad or dropped); repair "
                "its files or its transform, or leave the source out"
            )
        self._epoch_tokens, self._whole_epoch = 0, True

    def _add(self, slot: _Slot) -> None:
        block, head = slot.block, slot.head
        self.held.add(SampleChunk(block, slot.first, head.heads, slot.body))
        self.added += 1
        self._starved = False
        for _, (file, offset, reason) in sorted(head.bad.items()):
            self._skipped(self.name, file, offset, reason)
        self._loaded(self.name, slot.tokens, head.learned)
        if slot.last == block.records:
            self._refuse_empty_epochs(block, slot.tokens)
        else:
            self._epoch_tokens += slot.tokens
        if slot.last == block.records and block.ended:
            self.held.ended = True  # with the last group, so that no step waits for more
        self._changed()

    def _wants_more(self) -> bool:
        likely = self.under_way * self.work.group_tokens
        return self._starved or self.held.tokens + likely < self._wanted_tokens

    @contextmanager
    def _under_way(self, what: str) -> Iterator[None]:
        self._doing.append(what)
        try:
            yield
        finally:
            self._doing.remove(what)

    def _file(self, number: int) -> str:
        return self._source.layout.listing.files[number].name

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._wake.wait()

    def _notice(self) -> None:
        self._wake.set()
        self._wake = trio.Event()


class _Slot:
    """A group under way."""

    def __init__(self, block: BlockHead, first: int, last: int) -> None:
        self.block, self.first, self.last = block, first, last
        self.done = trio.Event()
        self.head = GroupHead(Heads(np.zeros(0, np.int64)), {})
        self.body: KeptBody | None = None  # None: it has no records

    @property
    def tokens(self) -> int:
        return int(np.maximum(self.head.heads.tokens, 0).sum())
