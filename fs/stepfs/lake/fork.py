"""Make a lake that shares the data of another one below a cut, which a group of the parent keeps.

The group is registered before anything is written, and the fork's identity last, after a look that the group still stands:
a half-made fork is no lake.
"""

import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs._internal.clock import Clock, SystemClock
from stepfs.errors import AbsentError, CorruptError, NewerFormatError, RefusedError, StepfsError, UsageError, command
from stepfs.format import keys, snapshot
from stepfs.format.commit import Commit, CommitKind, Origin, chain_digest, decode_commit
from stepfs.format.control import RECORD_ID_BYTES, ControlRecord, GroupRecord, encode_control
from stepfs.format.identity import FORK_GROUP, LakeIdentity
from stepfs.format.ids import INTEGER_MAX, SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.lake.concurrency import at_once, in_order, pages
from stepfs.lake.control import Control, Group
from stepfs.lake.create_once import create_own, listed_slots
from stepfs.lake.identity import create_lake, open_lake, refuse_existing
from stepfs.lake.log.append import ownerless
from stepfs.lake.log.apply import producer_after, read_commit, read_versions, rehearsed
from stepfs.lake.log.index import segment_bytes
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Entry, Store

_log = logging.getLogger("stepfs.lake.fork")

_NAME: Final = re.compile(FORK_GROUP + r"[0-9a-f]{32}")

_BACK_AT_ONCE: Final = 64
_FIRST_VERSION: Final = Version(1)  # floor 1: the origin commit is not taken for the start of a history
_RETIRE_S: Final = 30.0
_SEGMENTS_AT_ONCE: Final = 4
NO_END: Final = Step(INTEGER_MAX)


def group_name(child_lake_id: str) -> str:
    return FORK_GROUP + child_lake_id


def only_holds(name: str, group: GroupRecord) -> bool:
    """Whether a group is a fork's, or a replica's that is copied: it keeps data, and no trainer behind it moves on."""
    return bool(group.fork) or _NAME.fullmatch(name) is not None


async def group_in_parent(reader: LogReader, origins: OriginStores, clock: Clock | None = None) -> Group | None:
    """The group of a fork in its parent; None if this lake is no fork, or if the parent was deleted as a whole: then
    `stepfs verify` reports the lost steps.

    Only in the nearest origin: that lake itself holds the data that it shares with its own parent, as long as we hold it.
    A replica of a fork shares nothing.
    """
    if reader.identity.replica_of is not None:
        return None
    for parent in reader.state.origins[:1]:
        with suppress(AbsentError):
            store = origins.open(parent)
            identity = await open_lake(store)
            if identity.lake_id == parent.lake_id:
                return Group(Control(store, identity, clock or SystemClock()), group_name(reader.identity.lake_id))
    return None


async def release_origins(reader: LogReader, origins: OriginStores, clock: Clock) -> None:
    """Advance, and in the end retire, the group of this lake in the lake it was forked from."""
    group = await group_in_parent(reader, origins, clock)
    if group is None:
        return
    parent, record = reader.state.origins[0], await group.read()
    need = parent.parent_step(reader.first_live_step) if reader.first_live_step < parent.end else None

    def by_hand(*arguments: object) -> str:
        return command("stepfs", "checkpoint", parent.url, "--group", group.name, *arguments)

    if record is None:
        if need is not None:
            again = by_hand(need, "--new-group")
            _log.warning("%s holds the steps of this fork no more, and may reclaim them: %s", parent.url, again)
    elif need is not None and need <= record.need:
        return
    elif record.fork != reader.store.url:
        _log.warning(
            "%s: %s holds what this fork shares for %s, and nothing is released from here; if nobody else needs it: %s",
            reader.store.url,
            parent.url,
            f"the fork at {record.fork}" if record.fork else "whoever recorded its group by hand",
            command("stepfs", "retire-group", parent.url, group.name) if need is None else by_hand(need, "--keep", 1),
        )
    elif need is None:
        with suppress(AbsentError):  # another reclaimer, or an operator, has retired it: it is not brought back
            await group.retire()
    else:
        await group.revise(lambda kept: kept if min(kept, default=need) > need else frozenset({need}), revives=False)


@dataclass(frozen=True, slots=True)
class UnreachableCommits:
    """The contents that a fork up to the damage lacks, as far as they are known."""

    commits: int  # objects in the log from the first damaged version on
    next_step: Step  # one past the last step that is known to have been committed
    next_seqs: Mapping[str, int]  # of producers known to have committed more


async def left_out(reader: LogReader) -> UnreachableCommits:
    """Read the commits from the damage on; zero commits for a reader without damage."""
    if reader.damage is None:
        return UnreachableCommits(0, reader.state.next_step, {})
    prefix, first = keys.log_prefix(reader.identity.lake_id), reader.damage.version
    listed = await listed_slots(reader.store, prefix, after=first - 1)
    next_step = reader.state.next_step
    next_seqs: dict[str, int] = {}
    versions = list(map(Version, listed))
    async with aclosing(read_versions(reader.store, reader.identity.lake_id, versions)) as bodies:
        async for key, body in bodies:
            try:
                commit = decode_commit(body, key)
            except (CorruptError, NewerFormatError):
                continue
            next_step = max(next_step, commit.next_step)
            known = reader.state.producers.get(commit.producer_id)
            if commit.next_seq > (known.next_seq if known else 0):
                next_seqs[commit.producer_id] = commit.next_seq
    return UnreachableCommits(len(listed), next_step, next_seqs)


async def producers_before(reader: LogReader, step: Step) -> dict[str, snapshot.ProducerState]:
    """The producers as they stood when all steps before `step` were committed, and no other.

    `UsageError` if a commit holds steps on both sides. `RefusedError` if the log no longer says where one of them stood.
    """
    state, store, lake_id = reader.state, reader.store, reader.identity.lake_id
    if step == state.next_step:
        return dict(state.producers)
    cut = (await reader.entry(step)).version
    found = await read_commit(store, lake_id, cut)
    if found is None or found[0].kind is CommitKind.ORIGIN:
        raise RefusedError(
            f"{store.url}: the log does not say where producers stood at step {step}; leave --rewind out"
        )
    if found[0].first_step != step:
        first, end = found[0].first_step, found[0].next_step
        raise UsageError(f"--until {step}: one commit holds steps {first} to {end - 1}; use --until {first} or {end}")
    moved: dict[str, Commit] = {}  # the first commit of each behind the cut
    async for commit in _commits(reader, cut, state.version):
        if commit.kind not in {CommitKind.SEAL, CommitKind.ORIGIN}:
            moved.setdefault(commit.producer_id, commit)
    stood = {name: producer for name, producer in state.producers.items() if name not in moved}
    sought = {name for name, commit in moved.items() if (commit.kind, commit.epoch) != (CommitKind.EPOCH, 1)}
    last, floor = Version(cut - 1), reader.control.floor
    while last >= floor and not sought <= stood.keys():
        begin = Version(max(floor, last - _BACK_AT_ONCE + 1))
        latest = {commit.producer_id: commit async for commit in _commits(reader, begin, last)}
        stood |= {name: producer_after(latest[name]) for name in sought - stood.keys() if name in latest}
        last = Version(begin - 1)
    for name in sorted(sought - stood.keys()):
        raise RefusedError(f"{store.url}: where producer {name} stood at step {step} was reclaimed; leave --rewind out")
    return dict(sorted(stood.items()))


async def _commits(reader: LogReader, first: Version, last: Version) -> AsyncIterator[Commit]:
    versions = list(map(Version, range(first, last + 1)))
    async with aclosing(read_versions(reader.store, reader.identity.lake_id, versions)) as bodies:
        async for key, body in bodies:
            yield decode_commit(body, key)


@dataclass(frozen=True, slots=True)
class Cut:
    """The parent steps of a fork: those before `step`, then those from `step` on outside [skip_first, skip_end).

    None from `until` on.
    """

    step: Step
    skip_first: Step
    skip_end: Step
    until: Step = NO_END


def parent_steps(cut: Cut, first_live: Step, next_step: Step) -> list[range]:
    """Stretches of parent steps in the fork's order. `UsageError` if they do not fit the parent."""
    if not first_live <= cut.step <= next_step:
        raise UsageError(f"the fork point must be a live step: {first_live} to {next_step}, not {cut.step}")
    if not cut.step <= cut.skip_first <= cut.skip_end:
        raise UsageError(f"--skip {cut.skip_first}:{cut.skip_end} must lie at or after step {cut.step}")
    if cut.until < cut.step:
        raise UsageError(f"--until {cut.until} must lie at or after step {cut.step}")
    if next_step < cut.until < NO_END:
        raise UsageError(f"--until {cut.until}: the parent has {next_step} steps")
    end = min(cut.until, next_step)
    kept_until, kept_from = min(cut.skip_first, end), min(cut.skip_end, end)
    return [range(first_live, kept_until), range(kept_from, end)]


async def fork(
    parent: LogReader,
    store: Store,
    cut: Cut,
    clock: Clock,
    *,
    rewind: bool = False,
    note: Callable[[int, int], None] = lambda _steps, _whole: None,
) -> LakeIdentity:
    """Create the lake `store` as a fork of `parent`. `RefusedError` if there is a lake already.

    `rewind`: producers stand as at `until`; errors of `producers_before`. If the parent was opened with `until_damage`, the
    fork has the steps before the damage. `note` is called with the steps that are written and their whole number.
    """
    await refuse_existing(store)
    # Report mistakes before anything is written.
    shared = parent_steps(cut, parent.first_live_step, parent.state.next_step)
    lake_id = keys.new_lake_id()
    group = Group(parent.control, group_name(lake_id)) if any(shared) else None
    filled = False
    try:
        if group is not None:
            await group.register(store.url)
            await _look(parent)
            shared = parent_steps(cut, parent.first_live_step, parent.state.next_step)
        producers = await producers_before(parent, cut.until) if rewind else parent.state.producers
        await _write(parent, store, lake_id, cut, shared, producers, clock, note)
        if group is not None:
            await _check_held(group, store)
        filled = True
        identity = await create_lake(
            store,
            slices=parent.identity.grid,
            ext=parent.identity.ext,
            check_payload=parent.identity.check_payload,
            clock=clock,
            lake_id=lake_id,
        )
    except BaseException as error:
        # If the fork exists although the reply was lost, it needs the steps that the group holds.
        with trio.move_on_after(_RETIRE_S, shield=True), suppress(StepfsError):
            if not filled or (isinstance(error, RefusedError) and not await _exists(store, lake_id)):
                await _undo(store, lake_id, group)
        raise
    _name_others(parent, store, lake_id)
    return identity


async def _check_held(group: Group, store: Store) -> None:
    """The last look before the identity: the parent may have given up the steps of a group that is gone."""
    if await group.read() is None:
        raise RefusedError(f"{store.url}: the group of this fork was retired before it was complete; fork again")


async def _undo(store: Store, lake_id: str, group: Group | None) -> None:
    """Retire the group in the parent, then delete the objects that this process wrote, under an id that it drew."""
    if group is not None:
        with suppress(AbsentError):
            await group.retire()
    await store.delete([entry.key for entry in await store.list(f"{lake_id}/")])


def _name_others(parent: LogReader, store: Store, lake_id: str) -> None:
    """Say which groups of the parent belong to forks that were begun here before, and how to retire them."""
    for name, record in sorted(parent.control.groups.items()):
        if record.fork == store.url and name != group_name(lake_id):
            retire = command("stepfs", "retire-group", parent.store.url, name)
            _log.warning(
                "%s: an earlier fork to here, which was not completed or is gone, holds steps as group %s: %s",
                parent.store.url,
                name,
                retire,
            )


async def _look(parent: LogReader) -> None:
    """Follow the parent to its head. A damaged parent has no readable news, but its floor may move."""
    if parent.damage is None:
        await parent.refresh()
    if await parent.confirm():
        return
    if parent.damage is not None:
        raise RefusedError(f"{parent.store.url}: its log was reclaimed meanwhile; fork again")
    await parent.reopen()


async def _exists(store: Store, lake_id: str) -> bool:
    try:
        return (await open_lake(store)).lake_id == lake_id
    except AbsentError:
        return False


async def _write(
    parent: LogReader,
    store: Store,
    lake_id: str,
    cut: Cut,
    stretches: list[range],
    producers: Mapping[str, snapshot.ProducerState],
    clock: Clock,
    note: Callable[[int, int], None],
) -> None:
    """Write everything but the identity, which makes it a lake."""
    origin = Origin(
        url=parent.store.url,
        lake_id=parent.identity.lake_id,
        skip_first=cut.skip_first,
        skip_end=cut.skip_end,
        end=Step(parent.first_live_step + sum(map(len, stretches))),
    )
    state = await _fill(parent, store, lake_id, origin, stretches, producers, clock=clock, note=note)
    record = ControlRecord(
        record_id=entropy.token(RECORD_ID_BYTES),
        time_ms=state.time_ms,
        first_live_step=parent.first_live_step,
        floor=_FIRST_VERSION,
    )
    for number in range(2):  # without any, the placeholders would count as steps: one may be lost, or damaged
        await _create(store, keys.numbered(keys.control_prefix(lake_id), number), encode_control(lake_id, record))
    for prefix in (keys.plans_prefix, keys.sources_prefix):
        await copy_objects(parent.store, prefix(parent.identity.lake_id), store, prefix(lake_id))


async def copy_objects(
    parent: Store, old_prefix: str, store: Store, new_prefix: str, but: AbstractSet[str] = frozenset()
) -> None:
    """The parent's plans, or its listings of their sources, `but` those: a planned run goes on in the copy as it does there."""

    async def copy(entry: Entry) -> None:
        key = new_prefix + entry.key.removeprefix(old_prefix)
        body = await parent.get(entry.key) if key not in but else None
        if body is not None:
            await create_own(store, key, body, "run it again")

    async with aclosing(pages(parent, old_prefix)) as listed:
        async for page in listed:
            async with aclosing(in_order(page, copy, number=at_once(max(entry.size for entry in page)))) as copied:
                async for _ in copied:
                    pass


class _Renumbered:
    """The parent's entries as the fork's: dense step numbers from `first` on, every object one origin further away."""

    def __init__(self, parent: LogReader, stretches: list[range]) -> None:
        self._parent = parent
        self._stretches = [stretch for stretch in stretches if stretch]
        self._first_live = Step(stretches[0].start)
        self.first = Step(self._first_live // SEGMENT_STEPS * SEGMENT_STEPS)  # so that segments stay whole
        self.end = Step(self._first_live + sum(map(len, stretches)))
        self.payload_bytes = 0  # of the entries that were asked for
        self.records = 0

    async def entries(self, steps: range) -> tuple[snapshot.StepEntry, ...]:
        """Those below the first live one are placeholders for reclaimed steps, never shown nor read."""
        if not self._stretches:
            return tuple([await self._placeholder(step) for step in steps])
        found = []
        for step in steps:
            if step < self._first_live:
                found.append(await self._placeholder(step))
                continue
            entry = self._as_forked(await self._parent.entry(self._origin_of(step)), step)
            self.payload_bytes += entry.tgb.payload_bytes
            self.records += entry.tgb.records
            found.append(entry)
        return tuple(found)

    def _origin_of(self, step: int) -> Step:
        place = step - self._first_live
        for stretch in self._stretches:
            if place < len(stretch):
                return Step(stretch[place])
            place -= len(stretch)
        raise AssertionError(step)

    async def _placeholder(self, step: int) -> snapshot.StepEntry:
        """Any entry will do, but the first live one may stand in a damaged segment that the fork leaves out."""
        if self._stretches:
            pattern = await self._parent.entry(Step(self._stretches[0].start))
        elif self._parent.state.tail:
            pattern = self._parent.state.tail[-1]
        else:
            pattern = await self._parent.entry(self._first_live)
        return self._as_forked(pattern, step)

    def _as_forked(self, entry: snapshot.StepEntry, step: int) -> snapshot.StepEntry:
        tgb = replace(entry.tgb, origin=entry.tgb.origin + 1)
        return replace(entry, step=Step(step), version=_FIRST_VERSION, tgb=tgb)


async def _fill(
    parent: LogReader,
    store: Store,
    lake_id: str,
    origin: Origin,
    stretches: list[range],
    producers: Mapping[str, snapshot.ProducerState],
    *,
    clock: Clock,
    note: Callable[[int, int], None],
) -> snapshot.LogState:
    """Write the fork's segments, origin commit and snapshot; everything but the identity, which makes it a lake.

    Segments are written as they fill, a few at once, so that no history is too long for memory. They come before the
    commit, which has their totals, and carry the digest of the log's beginning.
    """
    entries, base = _Renumbered(parent, stretches), snapshot.genesis(lake_id, parent.identity.slices)
    assert entries.end == origin.end
    full = range(entries.first // SEGMENT_STEPS, entries.end // SEGMENT_STEPS)

    async def write(index: int) -> bytes:
        steps = range(index * SEGMENT_STEPS, (index + 1) * SEGMENT_STEPS)
        segment = snapshot.Segment(
            SegmentIndex(index), base.digest[: snapshot.SEGMENT_DIGEST_BYTES], await entries.entries(steps)
        )
        await _create(
            store,
            keys.extent(keys.index_prefix(lake_id), segment.index),
            snapshot.encode_segment(lake_id, base.slices, segment),
        )
        note(min(steps.stop, origin.end) - entries.first, origin.end - entries.first)
        return snapshot.pack_ref(segment)

    number = min(_SEGMENTS_AT_ONCE, at_once(segment_bytes(base.slices)))
    async with aclosing(in_order(full, write, number=number)) as written:
        references = b"".join([reference async for _, reference in written])
    tail = await entries.entries(range(max(entries.first, full.stop * SEGMENT_STEPS), entries.end))
    head = replace(
        base,
        version=Version(_FIRST_VERSION - 1),
        next_step=origin.end,
        time_ms=parent.state.time_ms,
        total_bytes=entries.payload_bytes,
        total_records=entries.records,
    )
    commit = replace(ownerless(head, CommitKind.ORIGIN, clock), origin=origin)
    body = rehearsed(head, commit)
    state = replace(
        head,
        version=commit.version,
        digest=chain_digest(commit.prev_digest, body),
        time_ms=commit.time_ms,
        producers={name: replace(producer, version=commit.version) for name, producer in producers.items()},
        origins=(origin, *parent.state.origins),
        first_segment=SegmentIndex(full.start),
        segment_refs=references,
        tail=tail,
    )
    await _create(store, keys.numbered(keys.log_prefix(lake_id), commit.version), body)
    await _create(store, keys.numbered(keys.snapshot_prefix(lake_id), commit.version), snapshot.encode_snapshot(state))
    return state


async def _create(store: Store, key: str, body: bytes) -> None:
    await create_own(store, key, body, "fork again, to the same or another URL")
