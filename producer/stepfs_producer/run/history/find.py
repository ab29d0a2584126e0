"""Finds the steps that hold a record, by its place in the order of each epoch and a search over positions.

A source is a sequence, and positions say how far each commit took it. So the commit that took a record is found by
halving, and the spans of its steps say which one, where. One block of the source is read per epoch, because only its
records know their order. Where files were changed and accepted so, each stretch of steps has a list of files of its own,
and its own order; where a block's files are not at hand any more, the spans of all its steps are looked at.
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
from stepfs.lake.kept_plans import LineageReader, kept_listing
from stepfs.lake.log.reader import LogReader
from stepfs.payload import COLUMNS, Spans
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.step import State, read_position
from stepfs_producer.run.history.kept_plans import plan_of, require_files
from stepfs_producer.run.history.positions import CommitBehind, Positions
from stepfs_producer.run.history.texts import RESTORE
from stepfs_producer.run.lake import committed_positions, frozen_listing
from stepfs_producer.run.prepare import source_specs
from stepfs_producer.sources.listing import Layout, located_files
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import Block, BlockTask, SourceSpec

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
        mine: list[Occurrence | Absence] = []
        for stretch in await _stretches(positions, log, asked.source, state):
            try:
                mine += await _in_stretch(log, reader, asked, positions, stretch, state.plan)
                answered = True
            except _ElsewhereError as error:
                elsewhere.append(error)
            except (AbsentError, RefusedError) as error:
                failed.append(error)
                found.append(NotSearched(producer_id, stretch.steps.start, stretch.steps.stop, str(error)))
        epochs = {one.epoch for one in mine if isinstance(one, Occurrence)}
        found += [one for one in mine if isinstance(one, Occurrence) or one.epoch not in epochs]
    if not answered:
        raise [*failed, *elsewhere][0]
    return [*found, *_inherited(log)]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps of a producer that were made from one listing of the source."""

    steps: range
    listing: str  # its digest
    start: Cursor  # before them; () if nothing was drawn, or that is not known any more
    end: Cursor
    is_last: bool
    is_all: bool = (
        False  # no file was ever accepted as it is now: whoever asks is to restore those that are not at hand
    )


async def _stretches(positions: Positions, log: LogReader, source: str, newest: State) -> list[_Stretch]:
    """All of them, in order. Whoever accepts a change marks it in the listing, so that none comes twice."""
    digest, end = newest.sources[source].listing, newest.sources[source].cursor
    listing = await kept_listing(log.store, log.identity.lake_id, digest)
    if listing is None or all(file.laid_out is None for file in listing.files):
        return [_Stretch(range(positions.first, positions.end), digest, (), end, is_last=True, is_all=True)]
    found: list[_Stretch] = []
    first, before = int(positions.first), Cursor()
    while (commit := await positions.at(first)) is not None:
        known = commit.state.sources.get(source)
        last, low, high = commit, commit.steps.stop, int(positions.end)
        while low < high:
            middle = (low + high) // 2
            other = await positions.at(middle)
            of_other = None if other is None else other.state.sources.get(source)
            if other is None or (of_other and of_other.listing) != (known and known.listing):
                high = middle if other is None else min(middle, other.steps.start)
            else:
                last, low = other, other.steps.stop
        after = last.state.sources.get(source)
        if known is not None and after is not None:
            is_last = known.listing == digest
            found.append(_Stretch(range(first, low), known.listing, before, after.cursor, is_last))
            before = after.cursor
        first = low
    return found


async def _in_stretch(
    log: LogReader,
    reader: LineageReader,
    asked: RecordQuery,
    positions: Positions,
    stretch: _Stretch,
    newest: str,
) -> list[Occurrence | Absence]:
    """`newest`: digest of the producer's newest plan."""
    listing = await frozen_listing(log.store, log.identity.lake_id, asked.source, stretch.listing)
    number = file_number(listing, asked.file)
    plan = await _plan_with(log, newest, asked.source)
    await trio.to_thread.run_sync(require_files, plan, asked.directory, [asked.source])
    spec = source_specs(plan, directory=asked.directory)[asked.source]
    corpus = _Corpus(spec, listing, number, asked.record, stretch.is_all)
    return await _Search(log, reader, corpus, positions, stretch).run()


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
    """Where a record stands in the order of an epoch: in which block, and if that can be read, where in it."""

    task: BlockTask
    fragments: int  # of an epoch
    block: Block | None
    index: int = 0  # in the block
    why: str = ""  # it cannot be read

    @property
    def begin(self) -> Cursor:
        return (*self.task.place, 0, 0) if self.block is None else (*self.block.place, self.index, 0)

    @property
    def end(self) -> Cursor:
        return (*self.task.next_fragment, 0, 0) if self.block is None else (*self.block.place, self.index + 1, 0)

    def progress(self, cursor: Cursor) -> float:
        """Epochs until a cursor, about, for a guess where to look next: blocks are taken to be as large as the record's."""
        epoch, fragment, _, taken, _ = cursor or (0, 0, 0, 0, 0)
        begins, follows = self.task.place, self.task.next_fragment if self.block is None else self.block.follows
        width = (follows.fragment if follows.epoch == begins.epoch else self.fragments) - begins.fragment
        within = 0.0 if self.block is None else min(taken / max(len(self.block.records), 1), 1.0) * width
        return epoch + (fragment + within) / self.fragments


@dataclass(frozen=True, slots=True)
class _Corpus:
    """A record in its source."""

    spec: SourceSpec
    listing: Listing
    file: int
    record: int
    must_be_read: bool

    def placed(self, epoch: int) -> _Place | None:
        """The place of the record in an epoch; None if the source ends before."""
        try:
            return self._found(epoch)
        except _ElsewhereError:
            raise
        except (AbsentError, RefusedError) as error:  # its block's files are gone, or others
            bare = Layout(self.spec, self.listing)
            fragments = bare.holding(self.file, self.record)
            if self.must_be_read or len(fragments) != 1:
                raise
            task = bare.task(bare.block_with(epoch, fragments[0]))
            return None if task is None else _Place(task, bare.fragments_count, None, why=str(error))

    def _found(self, epoch: int) -> _Place | None:
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
                    return _Place(whole, bare.fragments_count, block, int(at.argmax()))
                place = block.follows if block.follows[:2] == place[:2] else None
        raise _ElsewhereError(
            f"{self.listing.files[self.file].name} has no record at {self.record}; `stepfs-produce lineage` prints files and "
            "records as they are meant here"
        )

    def _located(self, files: Collection[int]) -> Listing:
        return located_files(self.spec, self.listing, files, advice=RESTORE)


class _Search:
    """The search in one stretch of a producer's steps."""

    def __init__(
        self, log: LogReader, reader: LineageReader, corpus: _Corpus, positions: Positions, stretch: _Stretch
    ) -> None:
        self._log = log
        self._reader = reader
        self._corpus = corpus
        self._positions = positions
        self._stretch = stretch
        self._low, self._low_cursor = stretch.steps.start, stretch.start

    async def run(self) -> list[Occurrence | Absence]:
        found: list[Occurrence | Absence] = []
        producer_id, start, end = self._positions.producer_id, self._stretch.start, self._stretch.end
        if self._corpus.listing.files[self._corpus.file].is_gone:
            return [Absence(producer_id, end[0], f"its file was gone from step {self._stretch.steps.start} on")]
        for epoch in range(start[0] if start else 0, end[0] + 1):
            placed = await trio.to_thread.run_sync(self._corpus.placed, epoch)
            if placed is None:
                return found
            if placed.end <= start or (end <= placed.begin and not self._stretch.is_last):
                continue  # of an earlier stretch, or of a later one
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
        high, behind = self._end, place.progress(self._stretch.end)
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
        found = await self._positions.at(low) if low < self._end else None
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
            over = self._cursor(commit.state) >= end or commit.steps.stop >= self._end
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

    @property
    def _end(self) -> int:
        return min(self._stretch.steps.stop, int(self._positions.end))

    def _cursor(self, state: State) -> Cursor:
        """() before the source was in the plan."""
        found = state.sources.get(self._corpus.spec.name)
        return () if found is None else found.cursor

    def _why(self, place: _Place, commit: CommitBehind | None) -> str:
        start = self._stretch.start
        if self._stretch.end <= place.begin:
            return "not drawn yet"
        if place.block is not None and place.index in place.block.records.bad:
            return f"it could not be decoded ({place.block.records.bad[place.index]})"
        if place.block is not None and place.index in place.block.records.excluded:
            return "the plan excludes it"
        if commit is None or commit.steps.start <= self._positions.first > 0:
            reclaimed = self._log.first_live_step >= self._positions.first
            return f"no step from {self._positions.first} on holds it" + ("; those before were reclaimed" * reclaimed)
        if start and any(start[2:]) and start[:2] == tuple(place.task.place[:2]):
            return "not drawn, when the rest of its block was left out because files had changed"
        why = f", and its block cannot be read again ({place.why})" if place.why else ""
        return f"held out, of another shard, dropped by the transform, or not fit to be decoded{why}"


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
