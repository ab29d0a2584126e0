"""Making steps of a lake again, and comparing them with those of the lake, or writing them as files of a mount.

Checksums decide. Only where they differ is the lake's slice read, to say in what.

A change of plan shows in the positions; there the planner is changed as a restart does it. Refused by name are
steps before the first position that is left, files that are gone or changed, another tokenizer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import trio

from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Epoch, SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.kept_plans import LineageReader
from stepfs.payload import COLUMNS, Spans, UnreadablePayloadError, read_spans
from stepfs.view.names import step_name
from stepfs.view.ranks import names_of
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.plan.planner import REVISION, Planner
from stepfs_producer.plan.step import State
from stepfs_producer.run.history.kept_plans import plan_of, require_files
from stepfs_producer.run.history.positions import CommitBehind, Positions
from stepfs_producer.run.history.texts import RESTORE
from stepfs_producer.run.lake import frozen_listing, kept_libraries, libraries
from stepfs_producer.run.pipeline import StepSink, conduct_here
from stepfs_producer.run.prepare import LocatedPlan, PreparedPlan, list_sources, prepare_plan, with_listings
from stepfs_producer.run.results import PlanTotals, Progress, callbacks_of, show_nothing
from stepfs_producer.run.workers.tasks import MadeStep, return_step
from stepfs_producer.sources.listing import continued_at, located

_SHOWN_MAX: Final = 100  # differences in words; all are counted

Placed = Mapping[int, "Expected"]  # by the plan's own number of a step


@dataclass(frozen=True, slots=True)
class Expected:
    """A step of the lake, and the state behind it if a commit ends there."""

    entry: StepEntry
    behind: State | None


@dataclass(frozen=True, slots=True)
class Difference:
    """`slice` None: the position behind the step, or the step as a whole."""

    step: int
    slice: int | None
    rank: int | None
    what: str


@dataclass(slots=True)
class Comparison:
    """The steps that were compared, or written, so far."""

    steps: int = 0
    files: int = 0  # written
    different: set[int] = field(default_factory=set)
    shown: list[Difference] = field(default_factory=list)

    def differ(self, difference: Difference) -> None:
        self.different.add(difference.step)
        if len(self.shown) < _SHOWN_MAX:
            self.shown.append(difference)


class ReplayProducer:
    """Gives tickets as a producer does, and hands the steps that were asked for to `take`, in order."""

    def __init__(
        self, placed: Placed, take: Callable[[Expected, MadeStep, Mapping[str, object]], Awaitable[None]]
    ) -> None:
        self._placed = placed
        self._take = take
        self._reserved: deque[tuple[int, Mapping[str, object]]] = deque()
        self._made: dict[int, MadeStep] = {}

    async def reserve(self, *, position: Mapping[str, object], records: Sequence[int], payload_bytes: int) -> Ticket:
        """A ticket for the step before `position`; the steps that are settled leave memory first."""
        del records, payload_bytes
        await self.flush()
        behind = position["step"]
        assert isinstance(behind, int)
        self._reserved.append((behind - 1, position))
        return Ticket(behind - 1, "")

    def renew(self, ticket: Ticket) -> Ticket:
        """The same ticket: nothing is uploaded."""
        return ticket

    def settle(self, ticket: Ticket, made: MadeStep) -> None:
        self._made[ticket.seq] = made

    async def flush(self) -> None:
        """Take the steps that are settled, up to the first that is not."""
        while self._reserved and self._reserved[0][0] in self._made:
            step, position = self._reserved.popleft()
            made = self._made.pop(step)
            if step in self._placed:
                await self._take(self._placed[step], made, position)


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Compares steps with those of the lake."""

    slices: Sequence[int]
    found: Comparison
    identity: LakeIdentity
    reader: LineageReader

    async def take(self, expected: Expected, made: MadeStep, position: Mapping[str, object]) -> None:
        """Compare one step and the position behind it."""
        entry, grid = expected.entry, self.identity.grid
        self.found.steps += 1
        refs = [entry.tgb.slice(SliceIndex(index)) for index in self.slices]
        for index, payload, count, crc, ref in zip(
            self.slices, made.payloads, made.records, made.crc32c, refs, strict=True
        ):
            if (len(payload), crc, count) != (ref.length, ref.crc32c, ref.records):
                rank = index // (grid.slices // grid.ranks)
                what = await self._in_words(entry, SliceIndex(index), payload)
                self.found.differ(Difference(entry.step, index, rank, what))
        if expected.behind is not None and expected.behind.position() != position:
            what = "the position behind it is another one: a file was edited, or the steps after it begin elsewhere"
            self.found.differ(Difference(entry.step, None, None, what))

    async def _in_words(self, entry: StepEntry, index: SliceIndex, payload: bytes) -> str:
        if len(self.found.shown) >= _SHOWN_MAX:
            return ""
        try:
            theirs: list[Spans] = []
            await self.reader.spans(entry, [index], lambda _, spans: theirs.append(spans))
            mine = await trio.to_thread.run_sync(read_spans, self.identity.ext, payload)
        except (StepfsError, UnreadablePayloadError) as error:
            return f"other bytes ({error})"
        return _difference(mine, *theirs)


@dataclass(frozen=True, slots=True)
class StepFiles:
    """Writes steps below a directory, under the names of a mount."""

    slices: Sequence[int]
    found: Comparison
    identity: LakeIdentity
    directory: Path

    async def take(self, expected: Expected, made: MadeStep, _position: Mapping[str, object]) -> None:
        """Write one step. `RefusedError` if it is there, or cannot be written."""
        await trio.to_thread.run_sync(self._write, expected.entry, made.payloads)
        self.found.steps += 1
        self.found.files += len(made.payloads)

    def _write(self, entry: StepEntry, batch: Sequence[bytes]) -> None:
        directory, names = self.directory / step_name(entry.step).decode(), names_of(self.identity)
        try:
            directory.mkdir(parents=True)
            for index, payload in zip(self.slices, batch, strict=True):
                (directory / names.name_of(SliceIndex(index)).decode()).write_bytes(payload)
        except OSError as error:
            raise RefusedError(f"--to {directory}: {error.strerror}; name an empty directory with room") from error


def _difference(mine: Spans, theirs: Spans) -> str:
    """The first difference of two payloads, in words."""
    if mine.sources != theirs.sources:
        return f"sources {', '.join(mine.sources)}, in the lake {', '.join(theirs.sources)}"
    rows = min(len(mine.table), len(theirs.table))
    other = np.flatnonzero((mine.table[:rows] != theirs.table[:rows]).any(axis=1))
    row = int(other[0]) if len(other) else rows
    if row < max(len(mine.table), len(theirs.table)):
        return f"span {row} is {_span(mine, row)}, in the lake {_span(theirs, row)}"
    for span in range(rows):
        ids, others = mine.ids_of(span), theirs.ids_of(span)
        if (at := np.flatnonzero(ids != others)).size:
            token = int(at[0])
            return f"token {token} of {_span(mine, span)} is {ids[token]}, in the lake {others[token]}"
    for span, (tag, other_tag) in enumerate(zip(mine.tags, theirs.tags, strict=False)):
        if tag != other_tag:
            return f"the tag of {_span(mine, span)} is {tag!r}, in the lake {other_tag!r}"
    return "the same spans and tokens, other bytes"


def _span(spans: Spans, row: int) -> str:
    if row >= len(spans.table):
        return "none"
    found = dict(zip(COLUMNS, spans.table[row].tolist(), strict=False))
    return (
        "source {name}, file #{file}, record {offset}, from its token {first} on (micro-batch {micro}, place {start}, "
        "{tokens} tokens, epoch {epoch})"
    ).format(name=spans.sources[found["source"]], **found)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The steps to be made again, and where they go."""

    lake: str
    steps: range
    producer_id: str | None = None  # of the steps, where several producers made them
    ranks: tuple[int, ...] | None = None  # that are encoded; all are planned
    to: Path | None = None  # write them there; None: compare them
    directory: str = "."  # of the plan's file
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class LibraryChange:
    """A library of another version than then. None: not installed."""

    library: str
    then: str | None
    now: str | None


@dataclass(slots=True)
class Replay:
    """The result of a replay."""

    options: ReplayOptions
    lake_id: str
    producer_id: str
    plans: list[str] = field(default_factory=list)
    found: Comparison = field(default_factory=Comparison)
    libraries: list[LibraryChange] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive commits of one plan."""

    before: State | None
    commits: tuple[CommitBehind, ...]

    @property
    def behind(self) -> State:
        return self.commits[-1].state


async def replay(options: ReplayOptions, reader: LineageReader, *, progress: Progress = show_nothing) -> Replay:
    """Make the steps of the reader's lake again. `AbsentError`, `RefusedError`, `UsageError` name what is missing."""
    begun_s = time.monotonic()
    find_modules_in(options.directory)
    run = await _Run.of(options, reader)
    await run.carry_out(progress)
    run.result.seconds = time.monotonic() - begun_s
    return run.result


def _made_of(state: State) -> tuple[str, Mapping[str, str]]:
    """Plan and listings: another listing was accepted where it begins."""
    return state.plan, {name: source.listing for name, source in state.sources.items()}


class _Run:
    """One replay, under way."""

    def __init__(self, options: ReplayOptions, positions: Positions, reader: LineageReader) -> None:
        self._options = options
        self._log = reader.log
        self._positions = positions
        self._reader = reader
        grid = self._log.identity.grid
        each = grid.slices // grid.ranks
        wanted = range(grid.ranks) if options.ranks is None else options.ranks
        if wanted and max(wanted) >= grid.ranks:
            raise UsageError(f"--ranks names rank {max(wanted)}; the lake has {grid.ranks} data ranks, from 0 on")
        self._slices = tuple(index for rank in wanted for index in range(rank * each, (rank + 1) * each))
        self.result = Replay(options, self._log.identity.lake_id, positions.producer_id)

    @classmethod
    async def of(cls, options: ReplayOptions, reader: LineageReader) -> _Run:
        producers = {(await reader.log.entry(Step(step))).producer_id for step in options.steps}
        asked = f"steps {options.steps.start}:{options.steps.stop}"
        if options.producer_id is None and len(producers) > 1:
            raise UsageError(f"{asked} are of {', '.join(sorted(producers))}; choose one with --producer-id")
        producer_id = options.producer_id or producers.pop()
        if options.producer_id is not None and options.producer_id not in producers:
            raise AbsentError(
                f"{asked}: none is of the producer {producer_id}; they are of {', '.join(sorted(producers))}"
            )
        return cls(options, Positions(reader.log, producer_id), reader)

    async def carry_out(self, progress: Progress) -> None:
        state: State | None = None
        with progress("replay", None) as show:
            for stretch in await self._stretches():
                prepared = await self._prepared(stretch)
                await self._note_libraries(stretch)
                placed = await self._placed(stretch)
                begin = Planner(prepared.rules).begin(stretch.before if state is None else state)
                if stretch.behind.since is None:  # of a version that does not keep it
                    begin = replace(begin, since=None)
                totals = PlanTotals(begin, begin)
                reason = await conduct_here(
                    prepared,
                    self._options.directory,
                    self._options.workers,
                    self._sink(placed),
                    callbacks_of(prepared, totals, show),
                    begin,
                    steps_max=max(placed) + 1,
                    of_step=len(self._slices) / self._log.identity.slices,
                )
                state = totals.state
                for number in range(state.step, max(placed) + 1):
                    entry = placed[number].entry
                    why = f"the plan has no such step any more: {reason}"
                    self.result.found.differ(Difference(entry.step, None, None, why))

    def _sink(self, placed: dict[int, Expected]) -> StepSink[MadeStep]:
        of, to = (self._slices, self.result.found, self._log.identity), self._options.to
        take = StepComparison(*of, self._reader).take if to is None else StepFiles(*of, to).take
        return StepSink(ReplayProducer(placed, take), return_step, self._options.ranks)

    async def _stretches(self) -> list[_Stretch]:
        positions, wanted = self._positions, self._options.steps
        if wanted.start < positions.first:
            raise AbsentError(f"steps below {positions.first} cannot be made again here: {positions.why_first}")
        commit = await self._commit(wanted.start)
        assert commit is not None
        before = None if commit.first else await positions.before(commit.steps.start)
        if before is None and not commit.first:
            later = await positions.at(commit.steps.stop)
            raise AbsentError(
                f"step {wanted.start} cannot be made again: the position before it is not left ({positions.why_first})"
                + ("" if later is None else f"; the first that can is {later.steps.start}")
            )
        state = None if before is None else before.state
        commits: list[CommitBehind] = []
        found: list[_Stretch] = []
        while commit is not None and commit.steps.start < wanted.stop:
            if commits and _made_of(commit.state) != _made_of(commits[0].state):
                found.append(_Stretch(state, tuple(commits)))
                state, commits = commits[-1].state, []
            commits.append(commit)
            commit = await self._commit(commit.steps.stop)
        return [*found, _Stretch(state, tuple(commits))]

    async def _commit(self, step: int) -> CommitBehind | None:
        try:
            return await self._positions.at(step)
        except RefusedError as error:
            raise RefusedError(
                f"the steps of {self._positions.producer_id} cannot be made again: a plan did not make them, or a newer "
                f"stepfs did ({error})"
            ) from error

    async def _placed(self, stretch: _Stretch) -> dict[int, Expected]:
        """The wanted steps of a stretch, by the plan's own numbers."""
        placed = {}
        for commit in stretch.commits:
            behind = commit.state.step
            for number, step in enumerate(commit.steps, behind - len(commit.steps)):
                if step in self._options.steps:
                    last = commit.state if number + 1 == behind else None
                    placed[number] = Expected(await self._log.entry(Step(step)), last)
        return placed

    async def _prepared(self, stretch: _Stretch) -> PreparedPlan:
        """The plan of the steps, with the listings of then; `RefusedError` if it would not make the same samples."""
        digest, sources = stretch.behind.plan, stretch.behind.sources
        store, lake_id = self._log.store, self._log.identity.lake_id
        plan = await plan_of(self._log, digest)
        if plan is None:
            raise AbsentError(f"the plan {digest} is not in the lake; restore its object plans/{digest}")
        self.result.plans.append(digest)
        place = LocatedPlan(plan, self._options.directory, stretch.behind.held_out)
        await trio.to_thread.run_sync(require_files, place.plan, place.directory, place.plan.sources.keys())
        now = await list_sources(place)
        listings = {}
        for name in now:
            frozen = await frozen_listing(store, lake_id, name, sources[name].listing)
            listings[name] = located(frozen, now[name], name, advice=RESTORE)
        prepared = await trio.to_thread.run_sync(prepare_plan, place, listings)
        before = {} if stretch.before is None else stretch.before.sources
        cursors = {}
        for one in prepared.sources:
            name = one.spec.name
            if name in before and before[name].listing != sources[name].listing:
                was = await frozen_listing(store, lake_id, name, before[name].listing)
                cursors[name] = continued_at(one.spec, was, listings[name], before[name].cursor)
        prepared = with_listings(prepared, {name: listings[name] for name in cursors}, cursors)
        then, here = stretch.behind.tokenizer, prepared.rules.tokenizer
        if then != here:
            raise RefusedError(
                f"the tokenizer is not the one that made these steps ({then}, here {here}); restore the file that the plan "
                "names"
            )
        for source in prepared.sources:
            name = source.spec.name
            if prepared.rules.sources[name].identity != sources[name].identity:
                raise RefusedError(f"source {name}: {await self._other_stepfs(stretch)}")
        return prepared

    async def _other_stepfs(self, stretch: _Stretch) -> str:
        """Why a source is another one under the same plan and tokenizer."""
        libraries = await self._libraries(stretch, stretch.commits[0].epoch)
        return f"another stepfs made these steps ({libraries.get('stepfs', 'unknown')}); install that one"

    async def _libraries(self, stretch: _Stretch, epoch: Epoch) -> Mapping[str, str | None]:
        store, producer_id = self._log.store, self._positions.producer_id
        return await kept_libraries(store, self._log.identity.lake_id, stretch.behind.plan, producer_id, epoch)

    async def _note_libraries(self, stretch: _Stretch) -> None:
        changes = []
        if stretch.behind.revision != REVISION:
            changes.append(LibraryChange("planner", str(stretch.behind.revision), str(REVISION)))
        here = libraries()
        for epoch in sorted({commit.epoch for commit in stretch.commits}):
            then = await self._libraries(stretch, epoch)
            changes += [LibraryChange(name, was, here.get(name)) for name, was in then.items() if was != here.get(name)]
        self.result.libraries += [one for one in dict.fromkeys(changes) if one not in self.result.libraries]
