"""The objects to delete, found by LIST, a page at a time: the same for a real run and a dry run."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepfs.format import keys
from stepfs.format.ids import SEGMENT_STEPS, Epoch, SegmentIndex, Step, Version
from stepfs.format.snapshot import LogState, ProducerState, StepEntry
from stepfs.lake.concurrency import together
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Entry, Store

_PAGE: Final = 1000
_PAGE_MAX: Final = 16_000  # a directory is read whole for each page
_NOBODY: Final = array("Q")

Do = Callable[[list[Entry]], Awaitable[None]]  # called with objects to delete, in the required order
LastDead = dict[str, tuple[Epoch, int]]  # producer component → epoch and seq


@dataclass(frozen=True, slots=True)
class Target:
    """The live part of a lake: the steps from `first_live` on, the log versions from `floor` on."""

    first_live: Step
    floor: Version


def last_dead(dead: Iterable[StepEntry], into: dict[str, tuple[Epoch, int]]) -> None:
    """Per producer component: epoch and seq of its last step among `dead`, which come in the order of steps."""
    for entry in dead:
        if entry.tgb.origin == 0:
            name = keys.component(entry.producer_id)
            into[name] = max(into.get(name, (Epoch(0), -1)), (entry.epoch, entry.tgb.seq))


def is_below(name: keys.DataName, last: Mapping[str, tuple[Epoch, int]]) -> bool:
    """Whether the name lies at or before its producer's last dead step."""
    return (name.epoch, name.seq) <= last.get(name.producer, (Epoch(0), -1))


def can_never_be_committed(name: keys.DataName, producer: ProducerState | None, *, sealed: bool) -> bool:
    """Whether no commit can name the object any more. `producer` and `sealed` are of a confirmed state that was read *before*
    the object was listed.
    """
    if sealed:
        return True
    return producer is not None and (name.epoch < producer.epoch or name.seq < producer.next_seq)


def ended_incarnations(before: LogState, after: LogState) -> dict[str, tuple[str, str]]:
    """The names under which the uploads of incarnations lie that ended between two states: producer component →
    (after this name, before that name).

    An incarnation's uploads have the seqs that were not committed before it; those of older ones were seen before.
    """
    found = {}
    for name, producer in after.producers.items():
        known = before.producers.get(name)
        epoch, seq = (known.epoch, known.next_seq) if known else (Epoch(0), 0)
        if producer.epoch > epoch or (after.sealed and not before.sealed):
            end = Epoch(producer.epoch + 1) if after.sealed else producer.epoch
            found[keys.component(name)] = keys.data_name(epoch, seq), keys.data_name(end, 0)
    return found


async def walk_doomed(reader: LogReader, target: Target, do: Do, known: LastDead | None = None) -> LastDead:
    """Pass every object that is below `target` to `do`, in batches. Returns each producer's last dead step, which may be
    `known`.
    """
    store, lake_id = reader.store, reader.identity.lake_id
    segments: list[Entry] = []

    async def dead_segments(page: list[Entry]) -> None:
        for entry in page:
            index = keys.segment_of(keys.index_prefix(lake_id), entry.key)
            if index is not None and (index + 1) * SEGMENT_STEPS <= target.first_live:
                segments.append(entry)

    boundary = keys.extent(keys.index_prefix(lake_id), SegmentIndex(target.first_live // SEGMENT_STEPS))
    await _each_page(store, keys.index_prefix(lake_id), dead_segments, end=boundary)
    last: LastDead = known or {}
    if known is None:
        async with aclosing(_dead_entries(reader, segments, target.first_live)) as parts:
            async for part in parts:
                last_dead(part, last)
    for producer, (epoch, seq) in sorted(last.items()):
        prefix = keys.producer_prefix(lake_id, producer)
        await _each_page(store, prefix, _only(keys.parse_data_key, do), end=f"{prefix}{epoch:010d}-{seq + 1:016d}")
    for start in range(0, len(segments), _PAGE):
        await do(segments[start : start + _PAGE])
    for prefix in (keys.log_prefix(lake_id), keys.snapshot_prefix(lake_id)):
        slots = _only(partial(keys.number_of, prefix), do)
        await _each_page(store, prefix, slots, end=keys.numbered(prefix, target.floor))
    return last


def _only(parse: Callable[[str], object], do: Do) -> Do:
    """`do` for the objects whose names `parse` accepts: other objects are not ours."""

    async def ours(page: list[Entry]) -> None:
        if found := [entry for entry in page if parse(entry.key) is not None]:
            await do(found)

    return ours


async def live_entries(reader: LogReader, first: Step, end: Step) -> AsyncGenerator[tuple[StepEntry, ...]]:
    """The entries of steps [first, end), a segment at a time; none is kept in memory.

    `CorruptError` if a segment is missing or unreadable.
    """
    state = reader.state
    for number in range(first // SEGMENT_STEPS, state.sealed_segments):
        index = SegmentIndex(number)
        if index * SEGMENT_STEPS >= end:
            return
        segment = await reader.segments.peek(index, state.segment_ref(index))
        yield tuple(entry for entry in segment.entries if first <= entry.step < end)
    yield tuple(entry for entry in state.tail if first <= entry.step < end)


async def _dead_entries(
    reader: LogReader, dead_segments: list[Entry], first_live: Step
) -> AsyncGenerator[list[StepEntry]]:
    """Entries below `first_live` that are still on record: in segments not deleted yet, the boundary's, the tail."""
    state = reader.state
    indices = {keys.segment_of(keys.index_prefix(reader.identity.lake_id), entry.key) for entry in dead_segments}
    boundary = SegmentIndex(first_live // SEGMENT_STEPS)
    if state.first_segment <= boundary < state.sealed_segments:
        indices.add(boundary)
    for index in sorted(index for index in indices if index is not None):
        segment = await reader.segments.load_unreferenced(index)
        if segment is not None:  # else: another reclaimer has deleted it, after the data that it names
            yield [entry for entry in segment.entries if entry.step < first_live]
    yield [entry for entry in state.tail if entry.step < first_live]


async def walk_orphans(reader: LogReader, last: LastDead, do: Do, *, since: LogState | None) -> None:
    """Pass the objects to `do` that can never be committed and that no live step names, except those up to `last`.

    `since`: only those that incarnations left which have ended after this state; None: through all of `data/`, which
    costs O(live).
    """
    state, lake_id = reader.state, reader.identity.lake_id
    if since is None:
        ranges: dict[str, tuple[str, str | None]] = {keys.data_prefix(lake_id): ("", None)}
        named = await _named(reader, reader.first_live_step)
    else:
        ended = ended_incarnations(since, state)
        ranges = {
            prefix: (prefix + after, prefix + end)
            for producer, (after, end) in ended.items()
            for prefix in [keys.producer_prefix(lake_id, producer)]
        }
        first = max(since.next_step, reader.first_live_step)
        named = await _named(reader, first) if ranges else {}
    producers = {keys.component(producer.producer_id): producer for producer in state.producers.values()}

    def is_orphan(key: str) -> bool:
        name = keys.parse_data_key(key)
        if name is None or is_below(name, last):
            return False
        if not can_never_be_committed(name, producers.get(name.producer), sealed=state.sealed):
            return False
        live = named.get(name.producer, _NOBODY)
        place = bisect_left(live, name.nonce)
        return place == len(live) or live[place] != name.nonce

    async def orphans(page: list[Entry]) -> None:
        if found := [entry for entry in page if is_orphan(entry.key)]:
            await do(found)

    for prefix, (after, end) in ranges.items():
        await _each_page(reader.store, prefix, orphans, after=after, end=end)


async def _named(reader: LogReader, first_live: Step) -> dict[str, array[int]]:
    """Per producer the random parts of the names of its live objects, sorted: 8 bytes each. A collision would only
    keep an orphan.
    """
    named: dict[str, array[int]] = {}
    async with aclosing(live_entries(reader, first_live, reader.state.next_step)) as parts:
        async for part in parts:
            for entry in part:
                name = keys.parse_data_key(entry.tgb.key) if entry.tgb.origin == 0 else None
                if name is not None:
                    named.setdefault(name.producer, array("Q")).append(name.nonce)
    return {producer: array("Q", sorted(nonces)) for producer, nonces in named.items()}


async def _each_page(store: Store, prefix: str, do: Do, *, after: str = "", end: str | None = None) -> None:
    """Pass the objects under `prefix`, behind the key `after` and before the key `end`, to `do`; no request beyond the
    page that reaches `end`.
    """
    limit = _PAGE
    page = await store.list(prefix, after=after, limit=limit)
    while True:
        inside = page if end is None else [entry for entry in page if entry.key < end]
        if len(page) < limit or len(inside) < len(page):
            if inside:
                await do(inside)
            return
        limit = min(2 * limit, _PAGE_MAX)
        page = await _beside(partial(do, inside), partial(store.list, prefix, after=page[-1].key, limit=limit))


async def _beside(work: Callable[[], Awaitable[None]], look: Callable[[], Awaitable[list[Entry]]]) -> list[Entry]:
    """What `look` returns, which is done beside `work`: DELETEs do not wait for the LIST of the next page."""

    async def done() -> list[Entry]:
        await work()
        return []

    _, found = await together(done, look)
    return found
