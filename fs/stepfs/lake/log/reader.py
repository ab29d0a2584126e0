"""Following the log: a bounded number of requests when nothing is new, and nothing published unchecked.

`head` is the state as read, `state` what may be shown; the floor check (`confirm`) stands between them (hazard 1). Readers
`poll`; writers `precede` the next slot, take it, `extend`, and `confirm` on every branch. One task at a time awaits here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from stepfs.errors import AbsentError, CorruptError, NewerFormatError, OtherHistoryError, ReclaimedError
from stepfs.format.commit import Commit
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.format.snapshot import LogState, Segment, StepEntry, genesis
from stepfs.lake.concurrency import together
from stepfs.lake.control import Control
from stepfs.lake.create_once import STRAY_GAP
from stepfs.lake.identity import check_identity
from stepfs.lake.log.apply import ChainError, LogDamage, apply, list_versions, read_commit
from stepfs.lake.log.carriers import LEVELS, Newest, carriers_behind, carriers_of, read_run
from stepfs.lake.log.index import LoneEntries, Segments
from stepfs.lake.log.snapshots import PassedOver, log_contains, newest_snapshot, rebuilt_segment
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.log")

_PROBES_BEFORE_LIST: Final = 4
_LISTS_PER_CATCH_UP: Final = 4
_MISSES_PER_FLOOR_PROBE: Final = 50
_JUMP_VERSIONS: Final = 512  # one that is so far behind goes on from the newest snapshot
_JUMP_LISTED: Final = 1000  # one page of a LIST
_SKIM_READS_MAX: Final = 4
_REOPENS_MAX: Final = 5
_SLOW_S: Final = 10.0  # what a writer read so long ago may be gone

Listed = tuple[list[Version], Version | None]  # versions up to the first gap, and the first one behind it


class LogReader:
    """The log of one lake as one process knows it."""

    def __init__(self, store: Store, identity: LakeIdentity, control: Control, state: LogState) -> None:
        self.store = store
        self.identity = identity
        self.state = state
        self.head = state
        self.first_live_step = control.first_live_step
        self.segments = Segments(store, identity, self._rebuilt)
        self.lone_entries = LoneEntries(store, identity)
        self.lone_entries_max = self.lone_entries.kept_max  # in memory
        self.damage: LogDamage | None = None  # the end of the log for a reader opened with `until_damage`
        self.control = control
        control.look_at_log = self.check_history
        self._lowest_unconfirmed: Version | None = None
        self.newest: Newest | None = None  # of one that may write
        self._misses = 0
        self._skim_level = 0  # of `carriers_behind`, where the last skim found something
        self._is_outrun = False  # the last look found more than it could read one by one
        self._stale = False  # until a `reopen` has succeeded
        self._astray: OtherHistoryError | None = None  # while the log is another one than was published here
        self.newer: NewerFormatError | None = None  # while the log goes on in a way that a later version has to read
        self.stands_in = False  # for a reader of which no more is known than how far it was

    @classmethod
    async def open(
        cls,
        store: Store,
        identity: LakeIdentity,
        *,
        control: Control | None = None,
        until_damage: bool = False,
        reads_only: bool = False,
    ) -> LogReader:
        """Newest snapshot that the log confirms, plus the short tail; floor-checked.

        With `until_damage` a commit that cannot be read or does not chain ends the log, and `damage` records it: a base
        for a fork, not to be polled. `reads_only`: a damaged newest control record is passed over. No floor is above the
        snapshot that this starts from, so what is read is sound; a later look at the floor raises.
        `OtherHistoryError` if the store lost what was read while this took long.
        """
        control = control or Control(store, identity)
        for _ in range(_REOPENS_MAX):
            passed_over, began_s, record = PassedOver(), trio.current_time(), control.number
            listed: dict[Version, Listed] = {}

            async def list_behind(version: Version, listed: dict[Version, Listed] = listed) -> None:
                listed[version] = await list_versions(store, identity.lake_id, Version(version + 1))

            start = await newest_snapshot(
                store, identity, control, passed_over=passed_over, lenient=reads_only, beside=list_behind
            )
            reader = cls(store, identity, control, start)
            reader.newest = None if reads_only else Newest()
            try:
                behind, _ = await together(
                    partial(reader._read_listed, listed.get(start.version)),
                    partial(reader._look_ahead, lenient=reads_only),
                )
                while behind is not None:
                    await reader._fill_gap(behind)
                    behind = await reader._read_listed()
                passed_over.check_reached(reader.head.version, store.url)
            except CorruptError as error:
                await control.refresh(lenient=reads_only)
                if control.number > record and control.floor > start.version + 1:  # since this round began
                    continue
                if not until_damage:
                    raise
                reader.damage = LogDamage(Version(reader.head.version + 1), str(error))
            if not await reader.confirm(lenient=reads_only):
                continue
            # Else the store may have been put back to an older copy between the log's requests and those of the floor.
            if trio.current_time() - began_s <= _SLOW_S or await reader.check_history():
                return reader
        raise CorruptError(f"{store.url}: the floor keeps passing the log; run `stepfs verify`, see its reclaimers")

    @classmethod
    async def continued(cls, store: Store, identity: LakeIdentity, state: LogState) -> LogReader:
        """Open a reader from what another one `knows`: two requests while it is the newest, and three for the floor.

        `OtherHistoryError` if the log has lost that: the process before, or one beside this, has read other steps.
        """
        reader = cls(store, identity, Control(store, identity, hint=state.control), state)
        try:
            whole = state.sealed_steps + len(state.tail) == state.next_step  # a large tail is not passed on
            _, ended, _ = await together(
                reader.check_history,
                partial(reader.read_on, _PROBES_BEFORE_LIST if whole else 0),
                partial(reader._look_ahead, lenient=True),
            )
            if whole and ended and await reader.confirm():
                return reader
        except CorruptError as error:  # damaged, or reclaimed and taken again
            if isinstance(error, OtherHistoryError):
                raise
        return await cls.open(store, identity, control=reader.control, reads_only=True)

    @property
    def astray(self) -> OtherHistoryError | None:
        """While the store lacks what was read here, of the log or of the control sequence: no step of this history will come."""
        return self._astray or self.control.astray

    @property
    def knows(self) -> LogState:
        """The published state, which names the newest control record known here, for `continued` in another process."""
        return replace(self.state, control=max(self.state.control, self.control.number))

    @property
    def live_bytes(self) -> int:
        """Payload bytes of the steps that are committed and not reclaimed. Any thread may ask."""
        return max(0, self.state.total_bytes - self.control.record.deleted_bytes)

    async def poll(self, published: Callable[[], None] = lambda: None, *, skims: bool = False) -> bool:
        """Look once for new commits; one request if there are none. True if `state` or `first_live_step` changed.

        `skims`, where nobody waits for the newest: at most four GETs, of carriers where commits come fast.

        The first new commit is shown, and `published` called, before the search for more: that search costs a round
        trip, and readers wait for the first commit.
        """
        before = (self.state.version, self.first_live_step)
        try:
            await self.refresh(partial(self._skim if skims else self._look, published))
        except NewerFormatError as error:
            self.newer = error
            raise
        self.newer = None
        return before != (self.state.version, self.first_live_step)

    async def _look(self, published: Callable[[], None]) -> None:
        self._misses += 1
        if self._misses % _MISSES_PER_FLOOR_PROBE == 0:
            await self.confirm()
            return
        found = await self._probe()
        if not found and self.head is self.state:  # else the last poll failed before it could confirm
            return
        if await self.confirm():
            published()
            if await self.catch_up(lists_max=1):
                await self.confirm()
        self._misses = 0

    async def _skim(self, published: Callable[[], None]) -> None:
        self._misses += 1
        level, in_a_row, found = self._skim_level, 0, False
        for _ in range(_SKIM_READS_MAX):
            behind = carriers_behind(self.head.version)
            if await self._reach(Version(behind[min(level, len(behind) - 1)])):
                found, in_a_row = True, in_a_row + 1
            elif found or level == len(LEVELS):
                break
            else:
                level += 1
        self._skim_level = max(0, level - 1) if in_a_row == _SKIM_READS_MAX else level
        if found or self.head is not self.state or self._misses % _MISSES_PER_FLOOR_PROBE == 0:
            if await self.confirm():
                published()
            self._misses = 0

    async def _reach(self, version: Version) -> bool:
        """Read a version further ahead, and with it all before it, into `head`; False if it is not there."""
        self._touch(Version(self.head.version + 1))
        found = await read_commit(self.store, self.identity.lake_id, version)
        if found is None:
            return False
        await self._read_versions(list(map(Version, range(self.head.version + 1, version + 1))), found)
        return self.head.version >= version

    def mark_stale(self) -> None:
        """Start again at the next `refresh`: a slot was taken and is gone, so a reclaim has passed it."""
        self._stale = True

    async def refresh(self, follow: Callable[[], Awaitable[object]] | None = None) -> None:
        """Move `head` to the log's end, from the newest snapshot if a slot below the floor has misled this reader."""
        try:
            if not self._stale:
                await (follow or self.catch_up)()
        except ChainError:
            # A stale writer's commit there does not chain either; it is corruption only if the floor did not move.
            if await self.confirm():
                await self.check_history()
                raise
        if self._stale:
            await self.reopen()

    async def precede(self, *, alone: bool = False) -> None:
        """What a writer does before it takes the slot behind `head`: follow; if nothing is new, see that the log has `head`,
        for in a store that was rolled back it would commit behind a hole. `alone`: the create will tell of others.
        """
        self.control.check_may_write()

        async def look() -> None:
            self._touch(Version(self.head.version + 1))
            began_s = trio.current_time()
            if alone or not await self.catch_up() or trio.current_time() - began_s > _SLOW_S:
                await self.check_history()

        await self.refresh(look)

    async def catch_up(self, *, lists_max: int = _LISTS_PER_CATCH_UP) -> bool:
        """Advance `head` until a probe misses: GET by GET at first, by LIST when far behind. True if it moved.

        After a LIST it probes again: a commit that arrived while the listed ones were read would otherwise cost a
        writer its attempt (64 simulated producers lost 29 % of their attempts without the final probe, 10 % with it).
        Bounded, because writers may outrun a slow reader; a reader publishes after one LIST, so that it shows
        something while it catches up.
        """
        start = self.head.version
        for _ in range(lists_max):
            # Who was far behind before is so again: five requests one after another would let the log move on once more.
            probes = 1 if self._is_outrun else _PROBES_BEFORE_LIST
            if await self.read_on(probes):
                self._is_outrun = False
                return self.head.version != start
            self._is_outrun = True
            first = Version(self.head.version + 1)
            self._touch(first)
            listed = await list_versions(self.store, self.identity.lake_id, first, _JUMP_LISTED)
            if len(listed[0]) < _JUMP_VERSIONS or not await self._jump():
                await self._read_listed(listed)
        return True

    async def _jump(self) -> bool:
        """Move `head` to the newest snapshot, if the log still has `head`: the index has the steps in between."""
        if not await log_contains(self.store, self.identity, self.head):
            return False  # the store was rolled back: to read on tells what is wrong
        try:
            start = await newest_snapshot(self.store, self.identity, self.control)
        except (CorruptError, NewerFormatError):
            return False
        if start.version <= self.head.version:
            return False
        self.head = start
        if self.newest is not None:
            self.newest.clear()
        return True

    async def read_on(self, versions_max: int) -> bool:
        """Read the next versions into `head`, one by one. False if there may be more than `versions_max`."""
        for _ in range(versions_max):
            if not await self._probe():
                return True
        return False

    async def _probe(self) -> bool:
        """Read the next version into `head`; False if it is not there."""
        version = Version(self.head.version + 1)
        self._touch(version)
        try:
            found = await read_commit(self.store, self.identity.lake_id, version)
        except CorruptError:
            if not await self._bridge():
                raise
            return True
        if found is None:
            return False
        self.extend(*found)
        return True

    def extend(self, commit: Commit, body: bytes) -> None:
        """Fold the commit of the next version into `head`; `ChainError` if it does not continue it."""
        applied = apply(self.head, commit, body)
        for segment in applied.segments:
            self.segments.remember(segment)
        self.head = applied.state
        if self.newest is not None:
            self.newest.keep(commit, body)

    def carrying(self, commit: Commit) -> Commit:
        """The commit of the next version, with those before it that it may carry."""
        return commit if self.newest is None else self.newest.carried_by(commit)

    async def confirm(self, *, lenient: bool = False) -> bool:
        """Probe the floor. If it has passed no slot acted on since the last check, publish `head`: True.

        False: `head` may rest on a resurrected slot; the next `refresh` or `poll` starts again.
        """
        await self.control.refresh(lenient=lenient)
        # Every slot that was probed, listed, or is about to be taken follows the published state.
        next_slot = Version(self.state.version + 1)
        lowest = next_slot if self._lowest_unconfirmed is None else self._lowest_unconfirmed
        if self.control.floor > lowest:
            self._stale = True
            return False
        self._lowest_unconfirmed = None
        self.state = self.head
        self.first_live_step = self.control.first_live_step
        return True

    async def reopen(self) -> None:
        """Forget `head`; start again from the newest snapshot. Refuses another lake under the same URL."""
        await check_identity(self.store, self.identity)
        fresh = await LogReader.open(self.store, self.identity, control=self.control)
        if fresh.state.version < self.state.version:
            raise self._gone_astray()
        _log.info("reopened at version %d (floor %d)", fresh.state.version, fresh.control.floor)
        self.state = self.head = fresh.state
        self.newest = None if self.newest is None else fresh.newest
        if self.stands_in:
            self.stands_in, self._astray = False, None
        self.first_live_step = fresh.first_live_step
        self.segments.replace_by(fresh.segments)  # a stale writer's commit may have completed one of ours
        self.lone_entries.clear()
        self._lowest_unconfirmed = None
        self._misses = 0
        self._stale = False

    async def check_history(self) -> bool:
        """`OtherHistoryError`, now and in `astray`, unless the log still has the newest commit that was read here. False: that
        was reclaimed. Once the control sequence was found to be another one, that is looked at, too.
        """
        head = self.head
        if self.control.astray is not None:
            await self.control.check_history()
        if await self._contains(head):
            if self.stands_in:
                self.mark_stale()  # `astray` until all is read
            else:
                self._astray = None
            return True
        if self.stands_in or self.control.floor <= head.version:
            raise self._gone_astray()
        self._astray = None
        self.mark_stale()
        return False

    async def _contains(self, state: LogState) -> bool:
        """Whether the log has a commit that was read; if not, the floor is newly known, for it may have passed."""
        for _ in range(2):  # a store may hide an object once
            if await log_contains(self.store, self.identity, state):
                return True
        await check_identity(self.store, self.identity)
        await self.control.refresh()
        return False

    async def check_shown(self, version: Version, digest: bytes, *, noticed: bool = False) -> None:
        """`OtherHistoryError` unless the log has the commit that another process has shown here, or had it before a reclaim.
        `noticed`: that one has seen that the log is another one; then a reclaim explains nothing.
        """
        shown = replace(self.state, version=version, digest=digest)
        has = digest == self.state.digest if version == self.state.version else await self._contains(shown)
        if not has and (noticed or self.control.floor <= version):
            raise _other_history(self.store.url, version)

    @classmethod
    def standing_in(
        cls,
        store: Store,
        identity: LakeIdentity,
        version: Version,
        digest: bytes,
        steps: tuple[Step, Step],
        time_ms: int,
    ) -> LogReader:
        """A reader for one that is gone, of a log that the store has lost: it knows that these steps were shown, and raises
        `OtherHistoryError` for each of them. It is `astray` until the log is found again.
        """
        known = genesis(identity.lake_id, identity.slices)
        sealed = SegmentIndex(steps[1] // SEGMENT_STEPS + 1)
        known = replace(
            known, version=version, digest=digest, next_step=steps[1], time_ms=time_ms, first_segment=sealed
        )
        reader = cls(store, identity, Control(store, identity), known)
        reader.first_live_step, reader.stands_in = steps[0], True
        reader._gone_astray()
        return reader

    def _gone_astray(self) -> OtherHistoryError:
        self._astray = _other_history(self.store.url, self.head.version)
        return self._astray

    def entry_if_loaded(self, step: Step) -> StepEntry | None:
        """The entry of a live step if it is in memory; None if it needs a request, or if there is no such step."""
        if not self.first_live_step <= step < self.state.next_step or self.stands_in:
            return None
        if step >= self.state.sealed_steps:
            return self.state.tail[step - self.state.sealed_steps]
        return self.segments.entry_if_loaded(step) or self.lone_entries.get(step)

    async def entry(self, step: Step) -> StepEntry:
        """The entry of a live step, loading its index segment if need be. Safe from many tasks at once."""
        entry = self.entry_if_loaded(step)
        if entry is not None:
            return entry
        self._check_live(step)
        index = SegmentIndex(step // SEGMENT_STEPS)
        segment = await self.load_segment(index)
        self.lone_entries.forget_segment(index)
        return segment.entries[step % SEGMENT_STEPS]

    async def lone_entry(self, step: Step) -> StepEntry:
        """The `entry` of a step that is opened in random order: reads only this step's part of the index if that is cheaper."""
        entry = self.entry_if_loaded(step)
        if entry is not None:
            return entry
        self._check_live(step)
        index, lone = SegmentIndex(step // SEGMENT_STEPS), self.lone_entries
        whole = (
            lone.is_scan(step)
            or self.segments.is_loading(index)
            or (lone.pays_whole(index) and self.segments.has_room())
        )
        lone.note(step)
        entry = None if whole else await lone.load(step, self.state.segment_ref(index))
        return await self.entry(step) if entry is None else entry

    def _check_live(self, step: Step) -> None:
        if not self.first_live_step <= step < self.state.next_step:
            live = range(self.first_live_step, self.state.next_step)
            extent = f"steps {live[0]} to {live[-1]} are" if live else "none is"
            raise AbsentError(f"step {step} is not in the lake ({extent})")
        if self.stands_in:
            raise self._gone_astray()

    async def load_segment(self, index: SegmentIndex) -> Segment:
        """One sealed segment, from memory or by one GET of all waiting tasks. `ReclaimedError` if it is gone."""
        try:
            return await self.segments.load(index, self.state.segment_ref(index))
        except CorruptError:
            await self._check_not_reclaimed(index)
            raise

    async def _rebuilt(self, index: SegmentIndex) -> Segment | None:
        """A segment that no snapshot covers yet."""
        return await rebuilt_segment(self.store, self.identity, self.control, index, self.head.version)

    async def _check_not_reclaimed(self, index: SegmentIndex) -> None:
        """`ReclaimedError` if the floor has passed a whole segment since this reader last looked at it."""
        await self.control.refresh()
        first = self.control.first_live_step
        if first >= (index + 1) * SEGMENT_STEPS:
            raise ReclaimedError(f"steps below {first} were reclaimed: no checkpoint that is kept needs them")

    def time_ms(self, step: Step) -> int:
        """When a live step was committed; the time of its segment's last step if that segment is not loaded."""
        entry = self.entry_if_loaded(step)
        if entry is not None:
            return entry.time_ms
        if self.stands_in:
            return self.state.time_ms
        return self.state.segment_ref(SegmentIndex(step // SEGMENT_STEPS))[0]

    async def _fill_gap(self, behind: Version) -> None:
        """Read the versions that a LIST left out before `behind`. `CorruptError` if one is missing and no carrier has it.

        Slots are taken in order, so a missing one was lost; a writer that took it would begin a second history.
        """
        while self.head.version + 1 < behind:
            if not await self._probe() and not await self._bridge():
                missing = f"log version {self.head.version + 1} is missing, but version {behind} is there"
                stray = numbered(log_prefix(self.identity.lake_id), behind)
                other = f"if no stepfs wrote it, delete {stray}"
                if behind - self.head.version <= STRAY_GAP:
                    other = f"if an older copy of the store was put back under producers, stop them and delete {stray} and all after it"
                raise CorruptError(f"{self.store.url}: {missing}; restore it, or {other}")

    async def _bridge(self) -> bool:
        """Go on by a commit that carries the next version, which cannot be read: the digests prove it. False if none has it."""
        before = self.head.version
        for carrier in carriers_of(before + 1):
            with suppress(CorruptError):  # of the version itself
                await self._read_versions([Version(version) for version in range(before + 1, carrier + 1)])
            if self.head.version > before:
                _log.warning(
                    "%s: log version %d cannot be read; version %d has it", self.store.url, before + 1, carrier
                )
                return True
        return False

    async def _look_ahead(self, *, lenient: bool) -> None:
        """Find the newest control record while the log is read: the look at the floor behind it is one request then."""
        with suppress(CorruptError):  # it is raised there
            await self.control.refresh(lenient=lenient)

    async def _read_listed(self, listed: Listed | None = None) -> Version | None:
        """Read all beyond `head` that a LIST shows, several GETs at once. Returns the first version behind a gap."""
        first = Version(self.head.version + 1)
        self._touch(first)
        versions, behind = listed or await list_versions(self.store, self.identity.lake_id, first)
        await self._read_versions(versions)
        return behind

    async def _read_versions(self, versions: Sequence[Version], last_read: tuple[Commit, bytes] | None = None) -> None:
        lake_id = self.identity.lake_id
        async with aclosing(read_run(self.store, lake_id, self.head, versions, last_read)) as commits:
            async for commit, body in commits:
                self.extend(commit, body)

    def _touch(self, version: Version) -> None:
        if self._lowest_unconfirmed is None or version < self._lowest_unconfirmed:
            self._lowest_unconfirmed = version


def _other_history(url: str, version: Version) -> OtherHistoryError:
    return OtherHistoryError(
        f"{url}: another history: the log has lost version {version}, which was read here, so the "
        "store was rolled back or lost objects; mount again, or restart this process: a producer goes on from what the "
        "lake has, training from a checkpoint that the lake still covers"
    )
