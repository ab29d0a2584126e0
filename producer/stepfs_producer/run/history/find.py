"""Finds the steps that hold a record, by its place in the order of each epoch and a search over positions.

A source is a sequence, and positions say how far each commit took it. So the commit that took a record is found by
halving, and the spans of its steps say which one, where. One block of the source is read per epoch, because only its
records know their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.keys import plans_prefix
from stepfs.format.planned import Listing
from stepfs.lake.kept_plans import LineageReader
from stepfs.lake.log.reader import LogReader
from stepfs.payload import COLUMNS, Spans
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.step import State, read_position
from stepfs_producer.run.history.kept_plans import plan_of, require_files
from stepfs_producer.run.history.positions import CommitBehind, Positions
from stepfs_producer.run.history.texts import RESTORE
from stepfs_producer.run.lake import committed_positions, frozen_listing
from stepfs_producer.run.prepare import source_specs
from stepfs_producer.sources.listing import Layout, located_files
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import Block, BlockAddress, SourceSpec

Cursor = tuple[int, ...]  # epoch, fragment, block, taken, into

_ADDRESS: Final = slice(COLUMNS.index("source"), COLUMNS.index("first"))


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """A record: `file` is a name in the source's listing, with or without the number of its entry."""

    source: str
    file: str
    record: int
    directory: str  # of the plan's file


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Tokens of the record in a step."""

    producer: str
    epoch: int
    step: int
    slice: int
    rank: int
    micro: int  # of the rank
    start: int  # token of the micro-batch
    tokens: int
    first: int  # token of the record


@dataclass(frozen=True, slots=True)
class Absence:
    """Why no step holds the record in an epoch."""

    producer: str
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class NotSearched:
    """Steps that may hold the record. With a producer: those of its own in this range; without: all, which are a parent's."""

    producer: str | None
    first_step: int
    next_step: int
    why: str

    def line(self) -> str:
        whose = "" if self.producer is None else f" of {self.producer}"
        return f"steps {self.first_step}:{self.next_step}{whose} were not searched: {self.why}"


Found = Occurrence | Absence | NotSearched


class _ElsewhereError(AbsentError):
    """No such record: it is of another producer's corpus, or of none."""


async def find_record(log: LogReader, reader: LineageReader, asked: RecordQuery) -> list[Found]:
    """The occurrences of a record by producer and epoch, and the steps that were not searched.

    `AbsentError`, `RefusedError`: no producer's steps could be searched, or none has the source, the file or the record.
    `UsageError`: several files are called so.
    """
    find_modules_in(asked.directory)
    producers = {}
    for producer_id, position in committed_positions(log).items():
        try:
            producers[producer_id] = read_position(position)
        except RefusedError:
            continue  # of another pipeline
    known = sorted({name for state in producers.values() for name in state.sources})
    if asked.source not in known:
        raise AbsentError(f"the lake has no source {asked.source!r}; its plans have: {', '.join(known) or 'none'}")
    found: list[Found] = []
    answered = False
    elsewhere: list[StepfsError] = []
    failed: list[StepfsError] = []
    for producer_id, state in sorted(one for one in producers.items() if asked.source in one[1].sources):
        positions = Positions(log, producer_id)
        searched = range(positions.first, positions.end)
        try:
            found += await _of_producer(log, reader, asked, positions, state)
            answered = True
        except _ElsewhereError as error:
            elsewhere.append(error)
        except (AbsentError, RefusedError) as error:
            failed.append(error)
            found.append(NotSearched(producer_id, searched.start, searched.stop, str(error)))
    if not answered:
        raise [*failed, *elsewhere][0]
    return [*found, *_inherited(log)]


async def _of_producer(
    log: LogReader, reader: LineageReader, asked: RecordQuery, positions: Positions, state: State
) -> list[Occurrence | Absence]:
    digest = state.sources[asked.source].listing
    listing = await frozen_listing(log.store, log.identity.lake_id, asked.source, digest)
    number = file_number(listing, asked.file)
    plan = await _plan_with(log, state.plan, asked.source)
    await trio.to_thread.run_sync(require_files, plan, asked.directory, [asked.source])
    spec = source_specs(plan, directory=asked.directory)[asked.source]
    return await _Search(log, reader, _Corpus(spec, listing, number, asked.record), positions, state).run()


def _inherited(log: LogReader) -> Iterator[NotSearched]:
    """The steps of a fork that are its parent's, in the parent's numbers: their commits are there."""
    for origin in log.state.origins[:1]:
        first = log.first_live_step
        for part in (range(first, origin.cut), range(max(first, origin.cut), origin.end)):
            if part:
                there = origin.parent_step(Step(part.start))
                why = f"they are steps {there}:{there + len(part)} of {origin.url}; ask that lake"
                yield NotSearched(None, part.start, part.stop, why)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a record in the order of an epoch."""

    block: Block
    index: int  # in the block
    fragments: int  # of an epoch

    @property
    def begin(self) -> Cursor:
        return (*self.block.place, self.index, 0)

    @property
    def end(self) -> Cursor:
        return (*self.block.place, self.index + 1, 0)

    def progress(self, cursor: Cursor) -> float:
        """Epochs until a cursor, about, for a guess where to look next: blocks are taken to be as large as the record's."""
        epoch, fragment, _, taken, _ = cursor or (0, 0, 0, 0, 0)
        begins, follows = self.block.place, self.block.follows
        width = (follows.fragment if follows.epoch == begins.epoch else self.fragments) - begins.fragment
        within = min(taken / max(len(self.block.records), 1), 1.0) * width
        return epoch + (fragment + within) / self.fragments


@dataclass(frozen=True, slots=True)
class _Corpus:
    """A record in its source."""

    spec: SourceSpec
    listing: Listing
    file: int
    record: int

    def placed(self, epoch: int) -> _Place | None:
        """The place of the record in an epoch; None if the source ends before."""
        bare = Layout(self.spec, self._located([self.file]))
        for fragment in bare.holding(self.file, self.record):
            place: BlockAddress | None = bare.block_with(epoch, fragment)
            while place is not None:
                task = bare.task(place)
                if task is None:
                    return None
                whole = Layout(self.spec, self._located({one.file for one in task.fragments})).task(place)
                assert whole is not None
                block = read_block(self.spec, whole)
                at = (block.records.files == self.file) & (block.records.offsets == self.record)
                if at.any():
                    return _Place(block, int(at.argmax()), bare.fragments_count)
                place = block.follows if block.follows[:2] == place[:2] else None
        raise _ElsewhereError(
            f"{self.listing.files[self.file].name} has no record at {self.record}; `stepfs-produce lineage` prints files and "
            "records as they are meant here"
        )

    def _located(self, files: Collection[int]) -> Listing:
        return located_files(self.spec, self.listing, files, advice=RESTORE)


class _Search:
    """The search in one producer's steps."""

    def __init__(
        self, log: LogReader, reader: LineageReader, corpus: _Corpus, positions: Positions, newest: State
    ) -> None:
        self._log = log
        self._reader = reader
        self._corpus = corpus
        self._positions = positions
        self._newest = self._cursor(newest)
        self._low, self._low_cursor = int(positions.first), Cursor()

    async def run(self) -> list[Occurrence | Absence]:
        found: list[Occurrence | Absence] = []
        producer_id = self._positions.producer_id
        for epoch in range(self._newest[0] + 1):
            placed = await trio.to_thread.run_sync(self._corpus.placed, epoch)
            if placed is None:
                return found
            commit = await self._first_past(placed)
            if commit is None:
                return [*found, Absence(producer_id, epoch, self._why(placed, None))]
            holders = await self._holders(commit, epoch, placed.end)
            found += holders or [Absence(producer_id, epoch, self._why(placed, commit))]
        return found

    async def _first_past(self, place: _Place) -> CommitBehind | None:
        """The first commit behind which the cursor is past a record.

        Sources are drawn evenly, so a guess between two known cursors is nearly right; between guesses, halving bounds the
        search where they are not. An epoch begins behind the same record's place in the one before.
        """
        wanted = place.progress(place.begin)
        low, before = self._low, place.progress(self._low_cursor)
        high, behind = int(self._positions.end), place.progress(self._newest)
        halve = False
        while low < high:
            size = high - low
            share = 0.5 if halve or not before <= wanted < behind else (wanted - before) / (behind - before)
            middle = low + min(int(size * share), size - 1)
            commit = await self._positions.at(middle)
            cursor = () if commit is None else self._cursor(commit.state)
            if commit is None:
                high = middle
            elif cursor > place.begin:
                high, behind = min(middle, commit.steps.start), place.progress(cursor)
            else:
                low, before = commit.steps.stop, place.progress(cursor)
            halve = not halve
        found = await self._positions.at(low)
        if found is not None:
            self._low, self._low_cursor = max(found.steps.start, self._low), place.begin
        return found

    async def _holders(self, first: CommitBehind, epoch: int, end: Cursor) -> list[Occurrence]:
        """The occurrences in the steps from this commit on, until the cursor is at `end`."""
        found: list[Occurrence] = []
        commit: CommitBehind | None = first
        while commit is not None:
            for step in commit.steps:
                if step >= self._positions.first:
                    found += await self._in_step(Step(step), epoch)
            over = self._cursor(commit.state) >= end
            commit = None if over else await self._positions.at(commit.steps.stop)
        return found

    async def _in_step(self, step: Step, epoch: int) -> list[Occurrence]:
        entry, grid = await self._log.entry(step), self._log.identity.grid
        source = self._corpus.spec.name
        slices = [grid.slice_of(unit) for unit in range(grid.units)]
        found: list[Occurrence] = []

        def take(index: SliceIndex, spans: Spans) -> None:
            if source not in spans.sources:
                return
            wanted = [spans.sources.index(source), epoch, self._corpus.file, self._corpus.record]
            rank, micro = divmod(grid.place_of(index)[0], grid.micro)
            for row in spans.table[(spans.table[:, _ADDRESS] == wanted).all(axis=1)].tolist():
                place = (rank, micro + row[0], row[1], row[2], row[7])
                found.append(Occurrence(entry.producer_id, epoch, step, index, *place))

        await self._reader.spans(entry, slices, take)
        return sorted(found, key=lambda one: one.first)

    def _cursor(self, state: State) -> Cursor:
        """() before the source was in the plan."""
        found = state.sources.get(self._corpus.spec.name)
        return () if found is None else (found.epoch, found.fragment, found.block, found.taken, found.into)

    def _why(self, place: _Place, commit: CommitBehind | None) -> str:
        if self._newest <= place.begin:
            return "not drawn yet"
        bad = place.block.records.bad
        if place.index in bad:
            return f"it could not be decoded ({bad[place.index]})"
        if commit is None or commit.steps.start <= self._positions.first > 0:
            reclaimed = self._log.first_live_step >= self._positions.first
            return f"no step from {self._positions.first} on holds it" + ("; those before were reclaimed" * reclaimed)
        return "held out, of another shard, dropped by the transform, or not fit to be decoded"


def file_number(listing: Listing, name: str) -> int:
    """The file of that name; the number of its entry may be left out. `AbsentError`, or `UsageError` if several fit."""
    names = [file.name for file in listing.files]
    if name in names:
        return names.index(name)
    wanted = "/" + name.lstrip("/")
    fits = [number for number, one in enumerate(names) if one.endswith(wanted)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        shown = ", ".join(names[number] for number in fits[:5])
        raise UsageError(f"--file {name!r}: {len(fits)} files are called so; name one of {shown}")
    raise _ElsewhereError(
        f"--file {name!r}: the source has no such file; it has {len(names)}, such as {', '.join(names[:3])}"
    )


async def _plan_with(log: LogReader, newest: str, source: str) -> Plan:
    """The newest plan, or if the source has left it, any that had it: its order is the same in all."""
    prefix = plans_prefix(log.identity.lake_id)
    if (plan := await plan_of(log, newest)) is not None and source in plan.sources:
        return plan
    for entry in await log.store.list(prefix):
        digest = entry.key.removeprefix(prefix)
        plan = None if "-" in digest else await plan_of(log, digest)
        if plan is not None and source in plan.sources:
            return plan
    raise AbsentError(
        f"the plan of source {source} is not in the lake; restore the objects plans/{newest} and its like"
    )
