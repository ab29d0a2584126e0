"""Finds the spans of a step of a lake, with names of files, and the records where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from stepfs.errors import AbsentError, UsageError
from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.planned import Listing, PlanStanding, read_plan_position
from stepfs.format.snapshot import StepEntry
from stepfs.lake.kept_plans import LineageReader, commit_of, kept_listing
from stepfs.lake.log.reader import LogReader
from stepfs.payload import Spans

if TYPE_CHECKING:
    from stepfs_producer.run.history.texts import NoText, RecordPart


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted spans of a lake. `micro` counts in the rank, or in the slice where that is given."""

    step: int | None = None
    rank: int | None = None
    micro: int | None = None
    token: int | None = None
    slice: SliceIndex | None = None


@dataclass(frozen=True, slots=True)
class ShownSpan:
    """Tokens of one record."""

    slice: SliceIndex
    rank: int
    micro: int  # of the rank
    start: int  # token of the micro-batch
    tokens: int
    source: str
    epoch: int
    file_number: int
    file: str | None  # None: the lake does not say any more
    record: int  # where the record begins in its file: bytes, rows, or the number of a document
    first: int  # token of the record
    text: str | None = None
    problem: str | None = None  # why there is no text although it was wanted
    tag: str | None = None  # None: the plan has none


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything that is shown."""

    lake_id: str
    entry: StepEntry
    plan: str | None  # digest of the plan that made the step
    spans: tuple[ShownSpan, ...]
    with_text: bool


async def shown_spans(
    reader: LineageReader, wanted: Wanted, texts_below: str | None, say: Callable[[str], None]
) -> Shown:
    """The spans; with `texts_below`, the directory of the plan's file, also their records.

    `say` is called with a line for each source whose list of files is not there.
    """
    log = reader.log
    newest = log.state.next_step - 1
    if newest < log.first_live_step:
        raise AbsentError(f"{log.store.url}: has no step yet")
    entry = await log.lone_entry(Step(newest if wanted.step is None else wanted.step))
    spans, parts = await _found(reader, entry, log.identity.grid, wanted, with_parts=texts_below is not None)
    producer = log.state.producers.get(entry.producer_id)
    standing = None if producer is None else read_plan_position(producer.position)
    made_by = await standing_of(log, entry)
    plan = None if made_by is None else made_by.digest
    listings = await listings_of(log, standing, {span.source for span in spans}, say)
    spans = [_named(span, listings) for span in spans]
    if texts_below is not None:
        newest_plan = "" if standing is None else standing.digest  # a fork lacks its parent's commits
        texts = await _texts(log, plan or newest_plan, listings, parts, texts_below)
        spans = [
            replace(span, text=one) if isinstance(one, str) else replace(span, problem=one.why)
            for span, one in zip(spans, texts, strict=True)
        ]
    return Shown(log.identity.lake_id, entry, plan, tuple(spans), texts_below is not None)


async def standing_of(log: LogReader, entry: StepEntry) -> PlanStanding | None:
    """The plan behind a step's commit; None once that is gone, of steps that a fork has of its parent, and where no plan is."""
    commit = await commit_of(log.store, log.identity.lake_id, entry.version)
    return None if commit is None else read_plan_position(commit.position)


async def _found(
    reader: LineageReader, entry: StepEntry, grid: Grid, wanted: Wanted, *, with_parts: bool
) -> tuple[list[ShownSpan], list[RecordPart]]:
    """The spans, and with their tokens where these are asked for."""
    placed = slices_of(grid, wanted)
    of_one_each = grid.micro > 1 and wanted.slice is None and wanted.micro is not None
    found: list[ShownSpan] = []
    parts: list[RecordPart] = []
    if with_parts:
        from stepfs_producer.run.history.texts import RecordPart  # noqa: PLC0415 - spans alone need no package of plans

    def take(index: SliceIndex, spans: Spans) -> None:
        rank, micro = placed[index]
        for row in _rows(spans, 0 if of_one_each else wanted.micro, wanted.token):
            number, start, tokens, source, epoch, file, record, first, *_ = spans.table[row].tolist()
            named = (spans.sources[source], epoch, file, None, record, first)
            tag = spans.tags[row] if spans.tags else None
            found.append(ShownSpan(index, rank, micro + number, start, tokens, *named, tag=tag))
            if with_parts:
                ids = spans.ids_of(row)
                parts.append(RecordPart(spans.sources[source], epoch, file, record, first, ids))

    await reader.spans(entry, list(placed), take)
    return found, parts


def slices_of(grid: Grid, wanted: Wanted) -> dict[SliceIndex, tuple[int, int]]:
    """The slices to be read → data rank, and micro-batch with which the file begins."""
    if wanted.slice is not None:
        unit, piece, _ = grid.place_of(wanted.slice)
        return {grid.slice_of(unit, piece): divmod(unit, grid.micro)}  # spans are in the first of its files
    if wanted.rank is not None and wanted.rank >= grid.ranks:
        raise UsageError(f"--rank {wanted.rank}: the lake has {grid.ranks} data ranks, from 0 on")
    ranks = range(grid.ranks) if wanted.rank is None else [wanted.rank]
    micros = range(grid.micro)
    if grid.micro > 1 and wanted.micro is not None:
        if wanted.micro >= grid.micro:
            raise UsageError(f"micro-batch {wanted.micro}: a rank has {grid.micro}, from 0 on")
        micros = range(wanted.micro, wanted.micro + 1)
    return {grid.slice_of(rank * grid.micro + micro): (rank, micro) for rank in ranks for micro in micros}


def _rows(spans: Spans, micro: int | None, token: int | None) -> list[int]:
    """The spans of a micro-batch, or the one that holds a token.

    `UsageError` beyond the file, `AbsentError` in padding.
    """
    table = spans.table
    if micro is None:
        return list(range(len(table)))
    if micro >= len(spans.ids):
        raise UsageError(f"micro-batch {micro}: the file has {len(spans.ids)}, from 0 on")
    wanted = table[:, 0] == micro
    if token is not None:
        if token >= spans.ids.shape[1]:
            raise UsageError(f"token {token}: a micro-batch has {spans.ids.shape[1]}, from 0 on")
        wanted &= (table[:, 1] <= token) & (token < table[:, 1] + table[:, 2])
        if not wanted.any():
            raise AbsentError(f"token {token} of micro-batch {micro} is padding: it belongs to no record")
    return [int(row) for row in wanted.nonzero()[0]]


async def listings_of(
    log: LogReader, standing: PlanStanding | None, sources: set[str], say: Callable[[str], None]
) -> dict[str, Listing]:
    """The listing of each source that is there."""
    found = {}
    for name in sorted(sources):
        known = None if standing is None else standing.sources.get(name)
        digest = "" if known is None else known.listing
        listing = await kept_listing(log.store, log.identity.lake_id, digest) if digest else None
        if listing is not None:
            found[name] = listing
            continue
        where = f"{log.store.url}/{log.identity.lake_id}/sources/{digest}/"
        say(f"the list of files of source {name} is not in the lake, so they have numbers only; restore {where}")
    return found


def _named(span: ShownSpan, listings: Mapping[str, Listing]) -> ShownSpan:
    listing = listings.get(span.source)
    if listing is None or span.file_number >= len(listing.files):
        return span
    return replace(span, file=listing.files[span.file_number].name)


async def _texts(
    log: LogReader, digest: str, listings: Mapping[str, Listing], parts: Sequence[RecordPart], directory: str
) -> Sequence[str | NoText]:
    from stepfs_producer.run.history.kept_plans import plan_of  # noqa: PLC0415 - as above
    from stepfs_producer.run.history.texts import NoText, record_texts  # noqa: PLC0415

    plan = await plan_of(log, digest) if digest else None
    if plan is None:
        return [NoText("the text of the plan is not in the lake; restore its object below plans/")] * len(parts)
    return await trio.to_thread.run_sync(record_texts, plan, listings, parts, directory)
