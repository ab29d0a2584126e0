"""The store is put back to an older copy (hazard 13): who knew the longer log notices, and mixes nothing."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import trio
from doubles.faults import LOST_REQUEST, Fault, Scripted
from doubles.trio_clock import TrioClock
from mutants import never_looks_back
from process_store import ProcessStore
from producer_world import World, append, caught, feed, simulate
from scenarios import scenario
from small_world import GROWN, NEED, STEPS, audited, checkpoint, clean, flipped, group, grow, process, register, small

from stepfs.checkpoints.record import record_checkpoint
from stepfs.errors import CorruptError, FencedError, OtherHistoryError, StoreUnreachableError
from stepfs.format.ids import Step, Version
from stepfs.format.keys import index_prefix, snapshot_prefix
from stepfs.lake.control import Control, Group
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import write_snapshot
from stepfs.lake.reclaim.run import Reclaimer
from stepfs.store.api import Entry, Put
from stepfs_producer.commit.backpressure import BackPressure


async def hazard_13(world: World, *, more: int = 0, rest_s: float = 0.0, beside: bool = False) -> None:
    """A copy of the store is put back under a producer that knows the longer log. `more` steps of another one come before it,
    or go `beside` it and were there from the beginning.
    """
    async with world.producer("after") as other:
        await feed(other, 1 if beside else 0)
        async with world.producer("p") as producer:
            await feed(producer, 4)
            await producer.flush()
            put_back = world.ledger.copied()
            for number in range(4, 8):
                await append(producer, number)
                await producer.flush()
            put_back()
            async with world.producer("before it") as before:
                await feed(before, more)
            await trio.sleep(rest_s)
            await feed(producer, 12)


@pytest.mark.parametrize("rest_s", [0.0, 2.0, 100.0])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("more", [0, 1, 3, 4])
def test_hazard_13_a_producer_that_knows_a_longer_log_commits_nothing_behind_a_hole(
    more: int, rest_s: float, beside: bool
) -> None:
    async def restarted(world: World) -> None:
        with pytest.raises(OtherHistoryError, match="restart this process: a producer goes on from what"):
            await hazard_13(world, more=more, rest_s=rest_s, beside=beside)
        async with world.producer("p") as producer:
            assert producer.position == 4
            await feed(producer, 6)
        world.check(p=6, **{"before it": more, "after": int(beside)})

    simulate(restarted)


@pytest.mark.parametrize("beside", [False, True])
def test_hazard_13_mutant_that_never_looks_back(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    never_looks_back(monkeypatch)

    async def broken(world: World) -> None:
        await hazard_13(world, beside=beside)
        world.check()

    with caught():
        simulate(broken)


class Slow(ProcessStore):
    """Sleeps before its next create in the log, while an older copy is put back."""

    put_back: Callable[[], None] | None = None

    async def create(self, key: str, body: bytes) -> Put:
        if self.put_back is not None and "/log/" in key:
            self.put_back()
            self.shared.watch = self.put_back = None
            await trio.sleep(11)
        return await super().create(key, body)


@scenario(simulate)
async def test_hazard_13_a_producer_that_slept_behind_its_look_does_not_say_that_it_committed(world: World) -> None:
    store = Slow(world.shared, actor="p")
    with pytest.raises(OtherHistoryError, match="another history"):
        async with world.producer("p", store) as producer:
            await feed(producer, 4)
            await producer.flush()
            put_back = world.ledger.copied()
            await feed(producer, 8)
            await producer.flush()
            store.put_back = put_back
            await append(producer, 8)
            await producer.flush()


@scenario(small, on=grow)
async def test_a_hole_that_a_blind_writer_left_is_named_with_the_way_out(world: World, monkeypatch) -> None:
    writer = await LogReader.open(process(world, "operator"), world.identity)
    put_back = world.ledger.copied()
    async with world.producer("d") as producer:
        await feed(producer, 2)
    never_looks_back(monkeypatch)
    await writer.refresh()
    put_back()
    world.shared.watch = None
    await seal(writer, TrioClock())
    monkeypatch.undo()
    with pytest.raises(
        CorruptError, match=r"older copy .* put back .*stop them and delete \S+/log/\d+ and all"
    ) as told:
        await LogReader.open(process(world, "reader"), world.identity)
    first = re.search(r"delete (\S+)", str(told.value))
    assert first is not None
    for key in [key for key in world.shared.objects if "/log/" in key and key >= first[1]]:
        world.shared.remove(key)
    reader = await LogReader.open(process(world, "reader"), world.identity)
    assert (reader.state.version, reader.state.sealed) == (world.ledger.state.version, False)


@scenario(small, on=grow)
async def test_an_operator_commits_nothing_behind_a_hole(world: World) -> None:
    operator = await LogReader.open(process(world, "operator"), world.identity)
    put_back = world.ledger.copied()
    async with world.producer("d") as producer:
        await feed(producer, 2)
    await operator.refresh()
    put_back()
    with pytest.raises(OtherHistoryError, match="another history"):
        await seal(operator, TrioClock())
    assert not world.ledger.broken


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("more", [0, 1])
@scenario(small, on=grow)
async def test_who_writes_control_records_notices_that_the_sequence_went_back(
    world: World, *, answered: bool, more: int
) -> None:
    """Behind the hole its record would be the newest, and give up steps of a lake that does not have them yet. The same if it
    was sent before, and the store did not answer. If another one has taken the slot of the record that was lost, that would
    be undone: an advance of the floor is no exception.
    """
    store = process(world, "run")
    run = group(world, "run", store)
    put_back = world.ledger.copied()
    await checkpoint(world, "run", NEED + 1, store)
    await run.read()

    async def away(_key: str, _body: bytes) -> Put:
        raise StoreUnreachableError("away")

    if not answered:
        store.create = away  # type: ignore[method-assign]
        with pytest.raises(StoreUnreachableError):
            await run.add(Step(NEED + 2))
        del store.create
    await trio.sleep(11)
    put_back()
    for _ in range(more):
        await clean(world)
    numbers = len(world.ledger.controls)
    assert numbers == GROWN + 1 + more
    for _ in range(2):
        with pytest.raises(OtherHistoryError, match="another history"):
            await run.add(Step(NEED + 2))
    assert len(world.ledger.controls) == numbers
    assert not world.ledger.broken
    await checkpoint(world, "run", NEED + 1)
    assert not world.ledger.broken


@scenario(small, on=grow)
async def test_who_has_looked_at_the_groups_before_an_outage_looks_again_behind_it(world: World) -> None:
    store = process(world, "run")
    run, get = group(world, "run", store), store.get
    put_back = world.ledger.copied()
    await checkpoint(world, "run", NEED + 1, store)
    await run.read()

    async def late(key: str, **options: int) -> bytes | None:
        if "/control/" in key:
            store.get = get  # type: ignore[method-assign]
            await trio.sleep(20)
            put_back()
        return await get(key, **options)

    store.get = late  # type: ignore[method-assign]
    with pytest.raises(OtherHistoryError, match="another history"):
        await run.add(Step(NEED + 2))
    assert not world.ledger.broken


@pytest.mark.parametrize("answered", [True, False])
@scenario(small, on=grow)
async def test_no_checkpoint_is_recorded_of_steps_that_are_lost_while_it_waits(world: World, *, answered: bool) -> None:
    """The copy lacks commits alone. If the look takes long, or the create has no answer, the steps are looked for again."""
    put_back = world.ledger.copied()
    async with world.producer("b") as producer:
        await feed(producer, 8)
    store = process(world, "run")
    log = await LogReader.open(store, world.identity)
    find, create = store.list, store.create

    async def hangs(prefix: str, **options: Any) -> list[Entry]:
        store.list = find  # type: ignore[method-assign]
        put_back()
        await trio.sleep(15)
        return await find(prefix, **options)

    async def unanswered(_key: str, _body: bytes) -> Put:
        store.create = create  # type: ignore[method-assign]
        put_back()
        return Put.UNKNOWN

    if answered:
        store.list = hangs  # type: ignore[method-assign]
    else:
        store.create = unanswered  # type: ignore[method-assign]
    numbers = len(world.ledger.controls)
    with pytest.raises(OtherHistoryError, match="another history"):
        await record_checkpoint(log.control, log.state.next_step, "run", log.state.next_step)
    assert len(world.ledger.controls) == numbers
    assert not world.ledger.broken


@scenario(small, on=grow)
async def test_a_reclaimer_takes_nothing_for_an_orphan_that_was_made_after_a_roll_back(world: World) -> None:
    """By the log that it knew, an epoch of the new history is over."""
    put_back = world.ledger.copied()
    for until in (6, 7, 8):
        async with world.producer("b") as producer:
            await feed(producer, until)
    reclaimer = Reclaimer(process(world, "old"), world.identity, clock=TrioClock())
    await reclaimer.run()
    put_back()
    async with world.producer("b") as producer:
        await feed(producer, 6)
        await producer.flush()
        await reclaimer.run()
        await reclaimer.run(orphans=True)
    assert not world.ledger.broken, world.ledger.broken
    reader = await LogReader.open(process(world, "stranger"), world.identity)
    for step in range(reader.first_live_step, reader.state.next_step):
        assert (await reader.entry(Step(step))).tgb.key in world.shared.objects


async def loses_a_delete(world: World, *, what: str) -> None:
    """Of one reclaim one delete of such objects gets no answer, while a copy is put back that lacks nothing but the record
    that gave the steps up.
    """
    put_back = world.ledger.copied()
    lost = []

    def loses_one(verb: str, key: str, _rng: Random) -> Fault | None:
        if verb != "delete" or f"/{what}/" not in key or lost:
            return None
        lost.append(key)
        put_back()
        return LOST_REQUEST

    store = ProcessStore(world.shared, actor="reclaimer", plan=loses_one)
    report = await Reclaimer(store, world.identity, clock=TrioClock()).run()
    assert lost
    assert report.first_live_step == NEED
    await audited(world)


DELETED = pytest.mark.parametrize("what", ["data", "index", "log", "snapshot"])


@DELETED
def test_hazard_13_a_delete_without_an_answer_is_not_sent_again_into_another_history(what: str) -> None:
    small(partial(loses_a_delete, what=what), on=grow)


@DELETED
def test_hazard_13_mutant_that_does_not_look_again_before_it_deletes(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_looks_back(monkeypatch)
    with caught():
        small(partial(loses_a_delete, what=what), on=grow)


@scenario(small, on=grow)
async def test_a_delete_without_an_answer_is_sent_again(world: World) -> None:
    store = ProcessStore(world.shared, actor="reclaimer", plan=Scripted([("delete", "", LOST_REQUEST)] * 2))
    assert (await Reclaimer(store, world.identity, clock=TrioClock()).run()).first_live_step == NEED
    await audited(world)


class Unanswered(Slow):
    """Its next create in the log gets no answer and is not carried out; meanwhile an older copy is put back."""

    async def create(self, key: str, body: bytes) -> Put:
        if self.put_back is None or "/log/" not in key:
            return await super().create(key, body)
        self.put_back()
        self.put_back = None
        return Put.UNKNOWN


@scenario(simulate)
async def test_hazard_13_a_create_without_an_answer_is_not_sent_again_into_another_history(world: World) -> None:
    store = Unanswered(world.shared, actor="p")
    with pytest.raises(OtherHistoryError, match="another history"):
        async with world.producer("p", store) as producer:
            await feed(producer, 4)
            await producer.flush()
            put_back = world.ledger.copied()
            await feed(producer, 8)
            await producer.flush()
            store.put_back = put_back
            await append(producer, 8)
            await producer.flush()
    assert not world.ledger.broken


async def lost_upload(world: World, *, fenced: bool = False) -> None:
    """The log is what it was; but of two uploads that waited for a slower one the store has lost those made before."""
    store = world.store("p")
    async with world.producer("p", store) as producer:
        await feed(producer, 1)
        await producer.flush()
        put_back = world.ledger.copied()
        slow = iter([15.0, 0.1, 12.0])
        store._latency = lambda verb, size, rng: next(slow) if verb == "put" else 0.01
        for number in (1, 2, 3):
            await append(producer, number)
        await trio.sleep(5)
        put_back()
        if fenced:
            async with world.producer("p"):
                pass
        await producer.flush()


def test_hazard_13_no_step_is_committed_whose_object_is_lost() -> None:
    async def restarted(world: World) -> None:
        with pytest.raises(OtherHistoryError, match="was uploaded and is gone"):
            await lost_upload(world)
        async with world.producer("p") as producer:
            assert producer.position == 1
            await feed(producer, 5)
        world.check(p=5)

    simulate(restarted)


@scenario(simulate)
async def test_a_producer_whose_uploads_are_gone_because_it_was_fenced_is_not_told_to_restart(world: World) -> None:
    with pytest.raises(FencedError, match="do not restart"):
        await lost_upload(world, fenced=True)


@scenario(small, on=grow)
async def test_no_snapshot_of_a_log_that_was_lost_comes_into_another_history(world: World) -> None:
    """Segments of the index have no history in their names: the next one of the new history would be taken for equal."""
    put_back = world.ledger.copied()
    reader = await LogReader.open(process(world, "late"), world.identity)
    async with world.producer("b") as producer:
        for until in range(6, 12):
            await feed(producer, until)
            await producer.flush()
            await reader.poll()
    put_back()
    objects = dict(world.shared.objects)
    with pytest.raises(CorruptError, match="another history"):
        await write_snapshot(reader.store, reader.identity, reader.state, reader.segments, reader.control)
    assert world.shared.objects == objects


@scenario(small, on=grow)
async def test_a_look_that_hung_while_an_older_copy_was_put_back_is_none(world: World) -> None:
    """It read new commits, then its next request took long: it was told of them before."""
    put_back = world.ledger.copied()
    store = process(world, "operator")
    reader = await LogReader.open(store, world.identity)
    async with world.producer("b") as producer:
        await feed(producer, 8)
    get = store.get

    async def hangs(key: str, *, bytes_max: int = 1 << 20) -> bytes | None:
        body = await get(key, bytes_max=bytes_max)
        if body is None and "/log/" in key:
            put_back()
            await trio.sleep(15)
        return body

    store.get = hangs  # type: ignore[method-assign]
    with pytest.raises(OtherHistoryError, match="another history"):
        await seal(reader, TrioClock())
    assert not world.ledger.broken


@scenario(small, on=grow)
async def test_an_opening_that_hung_while_an_older_copy_was_put_back_is_none(world: World) -> None:
    """The log is that which was lost, the groups are those of the copy: a checkpoint of lost steps would be recorded."""
    put_back = world.ledger.copied()
    async with world.producer("b") as producer:
        await feed(producer, 8)
    store = process(world, "run")
    find = store.list

    async def hangs(prefix: str, **options: Any) -> list[Entry]:
        if "/control/" in prefix:
            store.list = find  # type: ignore[method-assign]
            put_back()
            await trio.sleep(15)
        return await find(prefix, **options)

    store.list = hangs  # type: ignore[method-assign]
    with pytest.raises(OtherHistoryError, match="another history"):
        await LogReader.open(store, world.identity)
    assert (await LogReader.open(store, world.identity)).state.next_step == STEPS


@pytest.mark.parametrize("nth", [1, 2, 3])
@scenario(small, on=grow)
async def test_no_part_of_a_snapshot_is_sent_again_into_another_history(world: World, *, nth: int) -> None:
    """Two segments that an earlier writer left out, then the snapshot itself; one of them gets no answer."""
    put_back = world.ledger.copied()
    store = process(world, "late")
    reader = await LogReader.open(store, world.identity)
    async with world.producer("b") as producer:
        for until in range(6, 15):
            await feed(producer, until)
            await producer.flush()
            await reader.poll()
    snapshots = (index_prefix(world.identity.lake_id), snapshot_prefix(world.identity.lake_id))
    for key in [key for key in world.shared.objects if key.startswith(snapshots)]:
        world.shared.remove(key)
    create, sent = store.create, []

    async def unanswered(key: str, body: bytes) -> Put:
        sent.append(key)
        if len(sent) != nth:
            return await create(key, body)
        put_back()
        return Put.UNKNOWN

    store.create = unanswered  # type: ignore[method-assign]
    with pytest.raises(CorruptError, match="another history"):
        await write_snapshot(store, world.identity, reader.state, reader.segments, reader.control)
    assert len(sent) == nth


@scenario(small, on=grow)
async def test_who_follows_a_process_that_has_shown_steps_sees_that_the_log_is_another_one(world: World) -> None:
    store, put_back = process(world, "mount"), world.ledger.copied()
    async with world.producer("b") as producer:
        await feed(producer, 6)
    shown = (await LogReader.open(store, world.identity)).state
    for until in (None, 6, 9):  # the store is shorter, as long, longer
        if until is None:
            put_back()
        else:
            async with world.producer("b") as producer:
                await feed(producer, until)
        reader = await LogReader.open(store, world.identity)
        await reader.check_shown(reader.state.version, reader.state.digest)
        with pytest.raises(OtherHistoryError, match=f"the log has lost version {shown.version}"):
            await reader.check_shown(shown.version, shown.digest)


@scenario(small, on=grow)
async def test_what_was_reclaimed_is_no_other_history_unless_that_was_noticed_before(world: World) -> None:
    store = process(world, "mount")
    await Reclaimer(process(world, "reclaimer"), world.identity, clock=TrioClock()).run()
    reader = await LogReader.open(store, world.identity)
    reclaimed, other = Version(reader.control.floor - 1), b"-" * len(reader.state.digest)
    assert reclaimed >= 0
    await reader.check_shown(reclaimed, other)
    with pytest.raises(OtherHistoryError):
        await reader.check_shown(reclaimed, other, noticed=True)


@scenario(small, on=grow)
async def test_a_reader_that_stands_in_reads_nothing_until_the_log_is_found_again(world: World) -> None:
    store, put_back = process(world, "mount"), world.ledger.copied()
    async with world.producer("b") as producer:
        await feed(producer, 6)
    known, put_forth = (await LogReader.open(store, world.identity)), world.ledger.copied()
    put_back()
    async with world.producer("b") as producer:
        await feed(producer, 9)
    shown, first = known.state, known.first_live_step
    reader = LogReader.standing_in(
        store, world.identity, shown.version, shown.digest, (first, shown.next_step), shown.time_ms
    )
    for _ in range(2):
        assert (reader.first_live_step, reader.state.next_step) == (first, shown.next_step)
        for step in map(Step, range(first, shown.next_step)):
            assert reader.entry_if_loaded(step) is None
            assert reader.time_ms(step) == shown.time_ms
            for entry in (reader.entry, reader.lone_entry):
                with pytest.raises(OtherHistoryError):
                    await entry(step)
        with pytest.raises(OtherHistoryError):
            await reader.check_history()
        assert reader.astray is not None
    put_forth()
    assert await reader.check_history()
    await reader.poll()
    assert (reader.state.digest, reader.astray, reader.stands_in) == (shown.digest, None, False)
    assert await reader.entry(Step(shown.next_step - 1)) == await known.entry(Step(shown.next_step - 1))


async def known(world: World, what: str, store: ProcessStore) -> Callable[[], Awaitable[object]]:
    """A look at what others put on record: as a reader of the log, as a mount does for its group, or as a held producer."""
    if what == "log":
        reader = await LogReader.open(store, world.identity)
        return reader.poll
    control = Control(store, world.identity, TrioClock())
    look = Group.on(control, "run").read if what == "group" else BackPressure(control, steps_max=4).look
    await look()
    return look


async def only_groups_are_lost(world: World, *, what: str, more: int = 0) -> None:
    """The copy lacks no commit, but the checkpoint that a run waits behind. `more` records of others have come since."""
    store = process(world, "waits")
    put_back = world.ledger.copied()
    await checkpoint(world, "run", NEED + 1)
    look = await known(world, what, store)
    await trio.sleep(15)
    put_back()
    for number in range(more):
        await register(world, f"other {number}")
    with trio.fail_after(180):
        while True:
            await look()
            await trio.sleep(2)


WAITS = pytest.mark.parametrize("what", ["log", "group", "lead"])


@pytest.mark.parametrize("more", [0, 1, 3])
@WAITS
@scenario(small, on=grow)
async def test_hazard_13_who_waits_notices_that_only_groups_were_lost(world: World, *, what: str, more: int) -> None:
    """Else a producer is held for a checkpoint that its run has recorded, and the run waits for steps, for ever."""
    with pytest.raises(OtherHistoryError, match="another history: control record 2"):
        await only_groups_are_lost(world, what=what, more=more)


@WAITS
def test_hazard_13_mutant_that_waits_for_records_of_a_history_that_was_lost(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_looks_back(monkeypatch)
    with pytest.raises(trio.TooSlowError):
        small(partial(only_groups_are_lost, what=what), on=grow)


@scenario(small, on=grow)
async def test_readers_are_astray_until_the_groups_are_what_they_were(world: World) -> None:
    """As with a log: who waits for a step is told to begin again, and goes on if the copy was taken away again."""
    shorter = world.ledger.copied()
    await checkpoint(world, "run", NEED + 1)
    longer = world.ledger.copied()
    reader = await LogReader.open(process(world, "reader"), world.identity)
    shorter()
    await trio.sleep(100)
    with pytest.raises(OtherHistoryError, match="mount again, or restart"):
        await reader.control.refresh()
    for _ in range(2):
        with pytest.raises(OtherHistoryError):
            await reader.check_history()
        assert "control record 2" in str(reader.astray)
    longer()
    assert await reader.check_history()
    assert reader.astray is None
    await reader.control.refresh()
    assert not world.ledger.broken


@scenario(small, on=grow)
async def test_a_damaged_control_record_is_not_another_history(world: World) -> None:
    """Who knows the record goes on, as before it was damaged."""
    run = group(world, "run")
    before = await run.read()
    flipped(world, run.control.key(run.control.number))
    await trio.sleep(100)
    for _ in range(3):
        assert await run.read() == before
        await trio.sleep(100)


@scenario(small, on=grow)
async def test_who_waits_looks_whether_the_record_that_it_knows_is_there_once_a_minute(world: World) -> None:
    store = process(world, "run")
    run = group(world, "run", store)
    await run.read()
    before = len([event for event in world.shared.trace if event.actor == "run"])
    for _ in range(300):
        await trio.sleep(2)
        await run.read()
    assert len([event for event in world.shared.trace if event.actor == "run"]) - before <= 300 + 10
