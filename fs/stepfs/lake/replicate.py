"""A replica: the same lake in another store. Log and data are equal byte for byte; control records are its own.

*Data first.* What a log version names is there, and verified, before that version is. *Prefix.* The log is the lake's, from
the replica's floor on, without a gap. So whoever reads the replica reads the lake as it was a moment ago, wherever this
process is killed, and two of these processes write the same bytes.

*One writer.* `lake.msgpack`, the last object of a new replica, says `replica_of`, and producers refuse it. If the lake is
lost for good, a fork of the replica goes on. *Never shortened.* If the lake is another one, or an earlier one, or has given
up steps before they were copied, the copying ends: a log with a gap, or with another end, would be another history.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import trio

from stepfs._internal import entropy
from stepfs._internal.clock import Clock, SystemClock
from stepfs.errors import (
    AbsentError,
    CorruptError,
    NewerFormatError,
    OtherHistoryError,
    RefusedError,
    StepfsError,
    StoreUnreachableError,
    WithdrawnError,
)
from stepfs.errors import command as shell_command
from stepfs.format import keys
from stepfs.format.commit import Commit, CommitKind, decode_commit
from stepfs.format.control import RECORD_ID_BYTES, ControlRecord, GroupRecord, encode_control
from stepfs.format.identity import HOME_GROUP, REPLICA_GROUP, LakeIdentity, encode_lake
from stepfs.format.ids import FIRST_STEP, SEGMENT_STEPS, SegmentIndex, Step, Version
from stepfs.format.snapshot import LogState, Segment, StepEntry, decode_snapshot
from stepfs.format.tgb import Descriptor
from stepfs.lake.concurrency import pages
from stepfs.lake.control import Control, Group
from stepfs.lake.create_once import SlotLost, create_own, listed_slots, settled, take_slot
from stepfs.lake.fork import copy_objects, only_holds
from stepfs.lake.identity import check_identity, open_lake
from stepfs.lake.log.apply import ChainError, list_versions, read_commit, read_versions
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import log_contains, newest_snapshot, snapshot_due, write_snapshot
from stepfs.lake.reclaim.sweep import live_entries
from stepfs.lake.verify.data import TgbCheck
from stepfs.lake.verify.metadata import verify_metadata
from stepfs.store.api import Store
from stepfs.store.probe import probe_store

_AGAIN: Final = "replicate again"
_VERSIONS_MAX: Final = 64  # read ahead of what is copied
_COPIES: Final = 4  # at once
_TRIES: Final = 2  # of an object that is wrong
_IN_THREAD_BYTES: Final = 1 << 20  # below, a thread costs more than the sums of an object
_KEEP_S: Final = 1.0  # between looks at the groups of both
_LOOK_S: Final = 60.0  # between looks whether the lake is what it was

T = TypeVar("T")
Named = list[tuple[Step, Descriptor]]  # the objects of one commit, or of one segment


class _GoneError(CorruptError):
    """An object that the log names is not there. No damage if the lake has given up the step meanwhile."""

    def __init__(self, message: str, step: Step) -> None:
        super().__init__(message)
        self.step = step


class _Buffers:
    """Memory for objects on their way, `bytes_max` or one object, used again for what fits into it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0  # of all buffers
        self._free: list[bytearray] = []
        self._freed = trio.Event()

    @asynccontextmanager
    async def leased(self, size: int) -> AsyncGenerator[memoryview]:
        while (buffer := self._taken(size)) is None:
            await self._freed.wait()
        try:
            yield memoryview(buffer)[:size]
            self._free.append(buffer)
        except BaseException:
            self.bytes -= len(buffer)  # a thread that was left alone may still write into it
            raise
        finally:
            self._freed.set()
            self._freed = trio.Event()

    def _taken(self, size: int) -> bytearray | None:
        for number, buffer in enumerate(self._free):
            if len(buffer) >= size:
                return self._free.pop(number)
        while self._free and self.bytes + size > self._bytes_max:
            self.bytes -= len(self._free.pop())
        if self.bytes and self.bytes + size > self._bytes_max:
            return None
        self.bytes += size
        return bytearray(size)


@dataclass(eq=False, slots=True)
class Copier:
    """Copies data objects from one store to another, verified slice by slice: one read and one put each."""

    home: Store
    store: Store
    memory_bytes: int = 1 << 30
    note: Callable[[Copier, int], None] = lambda _copier, _step: None  # called for each copied object
    copied: int = 0  # objects
    copied_bytes: int = 0
    has_replica: bool = False  # this process has seen it there
    sound_below: Step = FIRST_STEP  # what this process has put, or checked, since it began the replica
    _buffers: _Buffers = field(init=False)

    def __post_init__(self) -> None:
        self._buffers = _Buffers(self.memory_bytes)

    async def in_order(
        self, parts: Sequence[tuple[Named, T]], publish: Callable[[list[T]], Awaitable[None]], *, again: bool = False
    ) -> None:
        """Copy the objects of all parts, a few at once, begun in order. `publish` gets the parts whose objects are here, and
        all before, as soon as that is so. The first error in this order is raised behind what comes before it. `again`: not
        those that are here as they should be.
        """
        missing = [len(named) for named, _ in parts]
        failed: dict[int, StepfsError] = {}
        published = 0
        slots, turn = trio.Semaphore(_COPIES), trio.Lock()

        async def advance() -> None:
            nonlocal published
            async with turn:
                begin = end = published
                while end < len(parts) and not missing[end]:
                    end += 1
                if begin < end <= min(failed, default=end):
                    published = end
                    await publish([item for _, item in parts[begin:end]])

        async def one(number: int, step: Step, tgb: Descriptor) -> None:
            try:
                try:
                    await self._copy(step, tgb, again=again)
                finally:
                    slots.release()
                missing[number] -= 1
                await advance()
            except StepfsError as error:  # raised below: a nursery would wrap it into a group
                failed.setdefault(number, error)

        async with trio.open_nursery() as nursery:
            for number, step, tgb in [(n, *each) for n, (named, _) in enumerate(parts) for each in named]:
                await slots.acquire()  # here, since trio begins the tasks of one moment in any order
                if failed:
                    break
                nursery.start_soon(one, number, step, tgb)
        await advance()
        if failed:
            raise failed[min(failed)]

    async def _copy(self, step: Step, tgb: Descriptor, *, again: bool) -> None:
        """`CorruptError` for an object that is damaged, or gone."""
        where = f"{self.home.url}/{tgb.key}: step {step}"
        async with self._buffers.leased(tgb.size + again) as room:  # one byte more shows an object that is too long
            if again and await _problem(self.store, tgb, room) == "":
                return
            body = room[: tgb.size]
            for _ in range(_TRIES):
                problem = await _problem(self.home, tgb, body)
                if problem is None:
                    raise _GoneError(f"{where}: the object is missing; restore it", step)
                if not problem:
                    break
            else:
                raise CorruptError(f"{where}: {problem}; restore the object, `stepfs verify` says what else to do")
            await self.store.put(tgb.key, [body])
        self.copied += 1
        self.copied_bytes += tgb.size
        self.note(self, step)


async def _problem(store: Store, tgb: Descriptor, room: memoryview) -> str | None:
    """How the object differs from the log, '' if it does not; None if there is none. Its bytes are in `room`."""
    got = await store.read_into(tgb.key, 0, room)
    if got is None:
        return None
    check = TgbCheck(tgb)
    if got < _IN_THREAD_BYTES:
        check.feed(room[:got])
    else:
        await trio.to_thread.run_sync(check.feed, room[:got])
    return next((problem for _, problem in check.finish()), "")


@contextmanager
def _shown(store: Store) -> Iterator[None]:
    """A place that hides what was written there a moment ago, before it has an identity or just behind it, is no lost lake."""
    try:
        yield
    except AbsentError:
        raise StoreUnreachableError(f"{store.url} does not show what was written there; {_AGAIN}") from None


@dataclass(eq=False, slots=True)
class Replica:
    """One replica and its lake, as one process keeps them together."""

    home: Control  # the lake's
    log: LogReader  # the replica's
    copier: Copier
    keeps_all: bool
    _keep_at_s: float = float("-inf")
    _look_at_s: float = float("-inf")

    @classmethod
    async def open(
        cls,
        copier: Copier,
        *,
        first: Step | None = None,
        keeps_all: bool = False,
        check: bool = False,
        clock: Clock | None = None,
    ) -> Replica:
        """The replica in `copier.store`, made if there is none: it begins at step `first`, or at the lake's first live one.
        `check`: put again what is not as the log says.

        `RefusedError` if the replica is of another lake or history, if another lake is there, or the lake itself.
        """
        home, store, clock = copier.home, copier.store, clock or SystemClock()
        identity = await open_lake(home)
        if identity.replica_of is not None:
            raise RefusedError(f"{home.url} is itself a replica: replicate {identity.replica_of}")
        lake, own = Control(home, identity, clock), replace(identity, replica_of=home.url, archive=keeps_all)

        async def opened() -> Replica:
            # A commit that is damaged or missing ends the log here, and is copied again.
            log = await LogReader.open(store, own, control=Control(store, own, clock), until_damage=True)
            return cls(lake, log, copier, own.archive)

        try:
            there = await open_lake(store)
        except AbsentError:
            if copier.has_replica:
                raise RefusedError(
                    f"{store.url} was a replica a moment ago, and nothing is there: put it back"
                ) from None
            # The lake might give steps up before they are copied.
            await _group(lake, store).register(store.url, store.url)
            await _begin(lake, copier, own, first)
            with _shown(store):
                begun = await opened()
            await begun.reach_first_step()
            await _took(store, keys.LAKE, encode_lake(own))
            with _shown(store):
                there = await open_lake(store)
        own = _checked_place(home, store, own, there)
        copier.has_replica = True
        if check:
            await _restore(home, store, own)
        replica = await opened()
        await replica.look()
        if check:
            await replica.check()
        return replica

    async def reach_first_step(self) -> None:
        """Follow the lake up to the first step that the replica shall have, which may lie behind the base of its log."""
        await self._check_history()
        while self.log.state.next_step < self.log.first_live_step:
            before = self.log.state.version
            await self.follow()
            if self.log.state.version == before:
                await self._check_history()
                raise StoreUnreachableError(f"{self.home.store.url} does not show its newest steps; {_AGAIN}")

    async def round(self) -> bool:
        """Copy what is new, or the first `_VERSIONS_MAX` versions of it, and look at both lakes when it is time. False if
        there is no more.
        """
        more = await self.follow()
        now_s = trio.current_time()
        if now_s >= self._look_at_s:
            await self.look()
        elif now_s >= self._keep_at_s:
            await self.keep()
        return more

    async def look(self) -> None:
        """Look whether the lake is what it was, then `keep`; and copy what a run keeps after its start."""
        await self._check_history()
        await self._check_end(self.log.head)
        await _copy_plans(self.home.store, self.log.store, self.home.identity.lake_id)
        self._look_at_s = trio.current_time() + _LOOK_S
        await self.keep()

    async def _check_history(self) -> None:
        """`RefusedError` if the lake is another one by now, or without the end of the replica's log."""
        home, state = self.home.store, self.log.state
        await check_identity(home, self.home.identity)
        for _ in range(
            2
        ):  # the floor is read once more behind the look: what is gone may have been reclaimed meanwhile
            await self._refresh_home()
            await self._check_gap()
            if self.home.floor > state.version or await log_contains(home, self.home.identity, state):
                return
        raise RefusedError(
            f"{home.url} does not have version {state.version} of its log as {self.log.store.url} has it: it was restored from"
            " an earlier time, or somebody wrote into the replica. Go on from the one that is right: make a new replica in"
            f" another place, or {shell_command('stepfs', 'fork', self.log.store.url, 'NEW')}"
        )

    async def _refresh_home(self) -> None:
        """Move to the lake's newest control record, or where the one that was known is lost, begin again from what there is:
        whether the lake is another one, its log says.
        """
        try:
            await self.home.refresh()
        except OtherHistoryError:
            self.home = Control(self.home.store, self.home.identity, self.home.clock)
            await self.home.refresh()

    async def _check_end(self, end: LogState) -> None:
        """A replica that was put back to an older copy of itself is opened again, before a hole is made in its log."""
        if not await log_contains(self.log.store, self.log.identity, end):
            raise StoreUnreachableError(
                f"{self.log.store.url} does not have version {end.version} of its log any more: it was put back to an"
                f" older copy, or others were faster; {_AGAIN}"
            )

    async def check(self) -> None:
        """Put again what of the replica is not as its log says. The first error is raised when all was looked at."""
        home, store, state, lake_id = self.home.store, self.log.store, self.log.state, self.log.identity.lake_id
        live, failed = self.log.first_live_step, None
        for number in range(live // SEGMENT_STEPS, state.sealed_segments + 1):
            index = SegmentIndex(number)
            try:
                entries = state.tail if number == state.sealed_segments else (await self._segment(index)).entries
                await self.copier.in_order([(_named(entries, live), None)], _nothing, again=True)
            except CorruptError as error:
                failed = failed or error
        log = keys.log_prefix(lake_id)
        for version in set(range(self.log.control.floor, state.version)) - (await listed_slots(store, log)).keys():
            await _put_again(
                home, store, keys.numbered(log, version)
            )  # a snapshot covers it: else it had been followed
        if failed is not None:
            raise failed

    async def _segment(self, index: SegmentIndex) -> Segment:
        ref, key = self.log.state.segment_ref(index), keys.extent(keys.index_prefix(self.log.identity.lake_id), index)
        try:
            return await self.log.segments.peek(index, ref)
        except CorruptError:
            if not await _put_again(self.home.store, self.log.store, key):
                raise
            return await self.log.segments.peek(index, ref)

    async def follow(self) -> bool:
        """Copy the versions behind the replica's head, at most `_VERSIONS_MAX`. False if there are no more."""
        commits: list[tuple[Commit, bytes]] = []
        damaged = False
        try:
            await self._read(Version(self.log.head.version + 1), commits)
        except (CorruptError, NewerFormatError):
            if not commits:
                raise
            damaged = True  # what comes before it goes first
        try:
            await self.copier.in_order(
                [(self._named(commit), (commit, body)) for commit, body in commits], self._publish
            )
        except _GoneError as error:
            await self._refresh_home()
            await self._check_gap(error.step)
            raise
        except ChainError:
            await self._check_history()  # another one is no damage
            raise
        return damaged or len(commits) > 1

    async def _read(self, first: Version, into: list[tuple[Commit, bytes]]) -> None:
        """The lake's next commits, with a LIST only if there are several."""
        home, lake_id = self.home.store, self.home.identity.lake_id
        for version in (first, first + 1):
            if (found := await read_commit(home, lake_id, Version(version))) is None:
                return
            into.append(found)
        versions, _ = await list_versions(home, lake_id, Version(first + 2), _VERSIONS_MAX - 2)
        async with aclosing(read_versions(home, lake_id, versions)) as bodies:
            async for key, body in bodies:
                into.append((decode_commit(body, key), body))

    def _named(self, commit: Commit) -> Named:
        named = [(Step(commit.first_step + number), tgb) for number, tgb in enumerate(commit.tgbs)]
        return [(step, tgb) for step, tgb in named if step >= self.log.first_live_step]

    async def _publish(self, commits: list[tuple[Commit, bytes]]) -> None:
        """Create the log versions whose data is here."""
        store, lake_id, due = self.log.store, self.home.identity.lake_id, False
        await self._refresh_home()
        await self._check_gap()  # a slot below the floor may be a reclaimed one that a sleeper took again
        if any(commit.kind is CommitKind.EPOCH for commit, _ in commits):
            await _copy_plans(self.home.store, store, lake_id)
        await self._check_end(self.log.head)
        for commit, body in commits:
            before = self.log.head
            self.log.extend(commit, body)
            key = keys.numbered(keys.log_prefix(lake_id), commit.version)
            if not await _took(store, key, body, partial(self._check_end, before)):
                try:
                    await read_commit(store, lake_id, commit.version)
                except CorruptError as error:
                    check = shell_command("stepfs", "replicate", self.home.store.url, store.url, "--check")
                    raise CorruptError(f"{store.url}: {error}; put it again: {check}") from error
                raise RefusedError(
                    f"{store.url}/{key} is not as at {self.home.store.url}: somebody wrote into the replica; make a new one in"
                    " another place"
                )
            due |= snapshot_due(before, self.log.head)
        if not await self.log.confirm():  # this process has slept while the replica was reclaimed
            raise StoreUnreachableError(f"{store.url}: others were faster; {_AGAIN}")
        if due:
            await write_snapshot(store, self.log.identity, self.log.state, self.log.segments, self.log.control)

    async def _check_gap(self, gone: Step | None = None) -> None:
        """`gone`: the step whose data is not there. A reclaim takes data long before the log versions that name it."""
        state = self.log.state
        lacks = gone is not None and self.home.first_live_step > gone
        if lacks or self.home.floor > state.version + 1:
            following = Version(self.log.head.version + 1)
            if not await self.log.confirm() or await read_commit(self.log.store, state.lake_id, following) is not None:
                raise StoreUnreachableError(
                    f"{self.log.store.url}: others were faster; {_AGAIN}"
                )  # they have copied it
            raise RefusedError(
                f"{self.home.store.url} has reclaimed steps from {state.next_step} on that were not copied: make a new replica in"
                f" another place, and delete {self.log.store.url}"
            )

    async def keep(self) -> None:
        """Have the replica give up what the lake has given up, and the lake keep what runs that read the replica need; or
        with `keeps_all` the replica everything, and the lake what is not copied.
        """
        self._keep_at_s = trio.current_time() + _KEEP_S
        await self._refresh_home()
        await self._check_gap()
        if not await self.log.confirm():
            self._keep_at_s = (
                trio.current_time()
            )  # it slept while the replica was reclaimed: again, once it has read that
            return
        end, live = self.log.state.next_step, self.home.first_live_step
        here = Group(self.log.control, HOME_GROUP)
        if not self.keeps_all and here.known is not None and here.known.need < min(live, end):
            with suppress(WithdrawnError):  # another one has seen more, and the replica was reclaimed
                await here.replace(frozenset({Step(min(live, end))}))
        hold = _group(self.home, self.log.store)
        runs = [
            group.need
            for name, group in self.log.control.record.holding.items()
            if name != HOME_GROUP and not only_holds(name, group)
        ]
        last = Step(max(end - 1, 0))  # the lake keeps the version of the step that it holds, and all that is not copied
        others = [group.need for name, group in self.home.record.holding.items() if name != hold.name]
        if runs:
            await self._hold(hold, min(*runs, last), runs=True)
        elif self.keeps_all and others:  # without any, the lake keeps everything
            known = hold.known
            lags = known is None or known.need < min(*others, last)
            await self._hold(hold, last if known is None or lags else known.need, runs=False)
        elif hold.known is not None:
            with suppress(AbsentError):
                await hold.retire()

    @property
    def hold(self) -> Group | None:
        """The lake's group for what the replica needs, if it stands."""
        group = _group(self.home, self.log.store)
        return None if group.known is None else group

    async def _hold(self, hold: Group, need: Step, *, runs: bool) -> None:
        """`runs`: it counts for producers' lead, which data alone does not (`only_holds`)."""
        url, need = self.log.store.url, max(need, self.home.first_live_step)
        marks = ("" if runs else url, url)
        if hold.known is None or (hold.known.fork, hold.known.replica) != marks:
            await hold.register(*marks)
        if hold.known is not None and hold.known.need != need:
            with suppress(WithdrawnError):  # reclaimed meanwhile: the next look says so, if it matters
                await hold.replace(frozenset({need}))


def _named(entries: Iterable[StepEntry], live: Step) -> Named:
    return [(entry.step, entry.tgb) for entry in entries if entry.step >= live]


async def _took(
    store: Store, key: str, body: bytes, look: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint
) -> bool:
    """Create an object. False if another one is there; one that is in doubt is not there. `look`: see `take_slot`."""
    outcome = settled(await take_slot(store, key, body, look), store, _AGAIN)
    if outcome == SlotLost(taken=False):
        raise StoreUnreachableError(f"{store.url}: the store calls {key} taken and shows nothing there; {_AGAIN}")
    return not isinstance(outcome, SlotLost)


async def _nothing(_: list[None]) -> None:
    pass


def _group(home: Control, store: Store) -> Group:
    """The lake's group that holds what the replica in `store` needs of it."""
    return Group(home, REPLICA_GROUP + keys.component(store.url))


def _checked_place(home: Store, store: Store, own: LakeIdentity, there: LakeIdentity) -> LakeIdentity:
    """The replica that is there. Whether it is an archive was said by whoever made it."""
    if there.lake_id != own.lake_id:
        raise RefusedError(
            f"{store.url} is lake {there.lake_id}, and {home.url} is {own.lake_id}: replicate to another place"
        )
    if there.replica_of is None:
        raise RefusedError(
            f"{store.url} is {home.url} by another name, or a copy that is a lake of its own: replicate to another place"
        )
    if own.archive and not there.archive:
        raise RefusedError(f"{store.url} was made without --keep-all, and is no archive: make one in another place")
    return there


async def _begin(home: Control, copier: Copier, own: LakeIdentity, first: Step | None) -> None:
    """All but the identity of a replica as of the lake's newest snapshot. After a kill it is begun again; the first control
    record fixes where the log begins, for whoever does that.
    """
    store, slot = copier.store, keys.numbered(keys.control_prefix(own.lake_id), 0)
    await probe_store(store, thorough=True)
    if await store.get(slot) is None:
        began = home.first_live_step
        try:
            record = await _copy_base_data(home, copier, first)
        except CorruptError as error:
            await home.refresh()
            if home.first_live_step == began:
                raise
            raise RefusedError(f"{home.store.url} has reclaimed steps before they were copied; {_AGAIN}") from error
        await _took(store, slot, encode_control(own.lake_id, record))
    at = Control(store, own)
    await at.refresh()
    if at.floor > 0:  # by whichever process took the slot
        await _copy_base(home.store, store, own.lake_id, at.floor)
    await _copy_plans(home.store, store, own.lake_id)


async def _copy_base_data(home: Control, copier: Copier, first: Step | None) -> ControlRecord:
    """Copy what the lake's newest snapshot names. Returns the replica's first control record."""
    identity, store = home.identity, copier.store
    log = await LogReader.open(home.store, identity, control=home)
    base = await newest_snapshot(home.store, identity, home)
    began, deleted = log.first_live_step, home.record.deleted_bytes
    live = Step(min(max(first or 0, began), max(log.state.next_step, base.next_step)))
    async with aclosing(live_entries(log, began, live)) as parts:
        async for part in parts:
            deleted += sum(entry.tgb.payload_bytes for entry in part)
    inherited = base.origins[0].end if base.origins else Step(0)
    if live < inherited:
        raise RefusedError(
            f"{home.store.url} is a fork, and its steps {live} to {inherited - 1} are in {base.origins[0].url}: "
            f"begin behind them, with --from {inherited}"
        )

    async def write(segments: list[tuple[Segment, bytes]]) -> None:
        for segment, body in segments:
            await create_own(store, keys.extent(keys.index_prefix(identity.lake_id), segment.index), body, _AGAIN)
            copier.sound_below = max(copier.sound_below, Step(segment.entries[-1].step + 1))

    for number in range(base.trimmed(live).first_segment, base.sealed_segments):
        index = SegmentIndex(number)
        segment, body = await log.segments.peek_stored(index, base.segment_ref(index))
        named = _named(segment.entries, max(live, copier.sound_below))
        await copier.in_order([(named, (segment, body))], write, again=True)
    await copier.in_order([(_named(base.tail, live), None)], _nothing, again=True)
    return ControlRecord(
        record_id=entropy.token(RECORD_ID_BYTES),
        time_ms=base.time_ms,
        first_live_step=live,
        floor=Version(max(base.version, 0)),
        deleted_bytes=deleted,
        groups={HOME_GROUP: GroupRecord(start=live)},
    )


async def _copy_base(home: Store, store: Store, lake_id: str, version: Version) -> None:
    """The commit and the snapshot with which the replica's log begins."""
    log_key, key = (keys.numbered(prefix(lake_id), version) for prefix in (keys.log_prefix, keys.snapshot_prefix))
    if await store.get(key) is not None:
        return
    body, snapshot = await _sound(home, log_key), await _sound(home, key)
    if body is None or snapshot is None:
        if await store.get(keys.LAKE) is not None:  # another replicator has made it meanwhile, and it has moved on
            raise StoreUnreachableError(f"{store.url}: another process has begun the replica meanwhile; {_AGAIN}")
        raise RefusedError(
            f"{store.url}: a replica was begun here at version {version}, which {home.url} has reclaimed since: delete what is"
            " here, or name another place"
        )
    await create_own(store, log_key, body, _AGAIN)
    await create_own(store, key, snapshot, _AGAIN)


async def _restore(home: Store, store: Store, own: LakeIdentity) -> None:
    """Put again what can be read of the replica's log, snapshots and index no more, as far as the lake has it."""
    lake_id = own.lake_id
    copied = (keys.log_prefix(lake_id), keys.snapshot_prefix(lake_id), keys.index_prefix(lake_id))
    for damage in await verify_metadata(store, own):
        if (
            damage.key.startswith(copied) and await store.get(damage.key) is not None
        ):  # what is lost comes behind its data
            await _put_again(home, store, damage.key)


async def _put_again(home: Store, store: Store, key: str) -> bool:
    if (body := await _sound(home, key)) is not None:
        await store.put(key, [body])
    return body is not None


async def _sound(home: Store, key: str) -> bytes | None:
    """An object of the lake, to be copied as it is. `CorruptError` for a log version or a snapshot that rots there: it may be
    the replica's only one. A segment is read again where it was put.
    """
    body, lake_id = await home.get(key), key.partition("/")[0]
    try:
        if body is not None and key.startswith(keys.log_prefix(lake_id)):
            decode_commit(body, key)
        elif body is not None and key.startswith(keys.snapshot_prefix(lake_id)):
            decode_snapshot(body, key)
    except CorruptError as error:
        raise CorruptError(f"{home.url}: {error}; put that object back, then {_AGAIN}") from error
    return body


async def _copy_plans(home: Store, store: Store, lake_id: str) -> None:
    for prefix in (keys.plans_prefix(lake_id), keys.sources_prefix(lake_id)):
        async with aclosing(pages(store, prefix)) as listed:
            there = {entry.key async for page in listed for entry in page}
        await copy_objects(home, prefix, store, prefix, there)
