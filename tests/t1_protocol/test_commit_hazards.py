"""The hazards of COMMIT.md, each met on purpose; and mutants that must be caught.

A mutant puts one classic mistake back. If its run still passed, the scenario would prove nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import trio
from doubles.faults import (
    CONFLICT_409,
    ERROR_500,
    ERROR_500_APPLIED,
    FALSE_412,
    LOST_REQUEST,
    LOST_RESPONSE,
    OWN_412,
    RESET_AFTER,
    RESET_BEFORE,
    Fault,
    Scripted,
    delayed,
)
from doubles.faulty_store import FaultyStore
from ledger import payload
from mutants import forgetful_rebase, never_looks_back, trusting_take_slot, undecided_is_believed
from process_store import ProcessStore
from producer_world import SLICES, World, append, caught, feed, reclaim_below, simulate
from scenarios import scenario
from small_world import grow, small

from stepfs.errors import FencedError, RefusedError
from stepfs.format import snapshot as snapshot_format
from stepfs.format.ids import Epoch
from stepfs.format.keys import LAKE, component
from stepfs.format.snapshot import LogState
from stepfs.lake.identity import create_lake
from stepfs.lake.log import snapshots as log_snapshots
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Put, Store
from stepfs.store.probe import examine_store
from stepfs_producer import AsyncProducer
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit import producer as producer_room
from stepfs_producer.commit.loop import IDENTITY_CHECK_S, CommitLoop, CommitStats
from stepfs_producer.commit.pace import Pacer
from stepfs_producer.commit.producer import TgbWriter
from stepfs_producer.commit.rebase import Incarnation
from stepfs_producer.commit.uploads import CommitWindow, Item


class Sleeper(FaultyStore):
    """Sleeps before its next create in the log, while all of `meanwhile` happens."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def create(self, key: str, body: bytes) -> Put:
        if self.meanwhile is not None and "/log/" in key:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await super().create(key, body)


async def hazard_01(world: World, faults: Sequence[Fault]) -> None:
    """A producer sleeps while the slots after its head are filled by others, consumed, and deleted."""
    store = Sleeper(world.shared, actor="sleeper")

    async def meanwhile() -> None:
        async with world.producer("busy") as busy:
            for number in range(20):
                await append(busy, number)
                await busy.flush()
                if number == 9:
                    await reclaim_below(world, 5)  # the floor rises once a second snapshot stands above it
        await reclaim_below(world, 15)
        store.plan = Scripted([("create", "log/", fault) for fault in faults])

    async with world.producer("sleeper", store) as sleeper:
        await append(sleeper, 0)
        await sleeper.flush()
        store.meanwhile = meanwhile
        await append(sleeper, 1)
        await sleeper.flush()
        assert sleeper.tally.lost == 1
    assert world.ledger.counts["zombie slots"] == 1, "the sleeper did take a deleted slot"
    world.check(sleeper=2, busy=20)


@pytest.mark.parametrize("faults", [[], [LOST_RESPONSE], [OWN_412], [ERROR_500_APPLIED], [LOST_REQUEST, RESET_AFTER]])
def test_hazard_01_slot_resurrection(faults: list[Fault]) -> None:
    """Including: the create lands, the reply is lost, the GET says mine, and the floor has passed."""
    simulate(lambda world: hazard_01(world, faults))


async def filled_and_reclaimed(world: World, busy: AsyncProducer, first: int) -> None:
    """Twenty commits by `busy`, of which few are left."""
    for number in range(first, first + 20):
        await append(busy, number)
        await busy.flush()
        if number == first + 9:
            await reclaim_below(world, first + 5)
    await reclaim_below(world, first + 15)


async def a_neighbours_schedule(world: World, faults: Sequence[Fault]) -> None:
    """SlateDB 352 and 1622: a writer stalls; its successor fences it, writes, and what would have stopped it is collected."""
    store = Sleeper(world.shared, actor="stalled")

    async def meanwhile() -> None:
        async with world.producer("w") as successor:
            await filled_and_reclaimed(world, successor, 1)
        store.plan = Scripted([("create", "log/", fault) for fault in faults])

    with pytest.raises(FencedError):
        async with world.producer("w", store) as stalled:
            await append(stalled, 0)
            await stalled.flush()
            store.meanwhile = meanwhile
            await append(stalled, 1)  # acknowledged by nobody
            await stalled.flush()
    assert world.ledger.counts["zombie slots"] == 1, "it did take the slot of its successor's fence"
    world.check(w=21)


@pytest.mark.parametrize("faults", [[], [LOST_RESPONSE], [ERROR_500_APPLIED]])
def test_a_stalled_writer_is_not_acknowledged_in_the_slot_of_its_fence(faults: list[Fault]) -> None:
    simulate(lambda world: a_neighbours_schedule(world, faults))


async def a_fence_in_a_collected_slot(world: World) -> None:
    """SlateDB 1682: while a successor writes its fence, the writer that it fences fills that slot, and the slot is collected."""
    store = Sleeper(world.shared, actor="successor")
    with pytest.raises(FencedError):
        async with world.producer("w") as fenced:
            await append(fenced, 0)
            await fenced.flush()
            store.meanwhile = partial(filled_and_reclaimed, world, fenced, 1)
            async with world.producer("w", store) as successor:
                assert successor.next_seq == 21
                await append(successor, 21)
                await successor.flush()
            await append(fenced, 21)
            await fenced.flush()
    assert world.ledger.counts["zombie slots"] == 1, "the fence did take a deleted slot"
    world.check(w=22)


def test_a_fence_in_a_collected_slot_is_written_again() -> None:
    simulate(a_fence_in_a_collected_slot)


SLOTS = [partial(hazard_01, faults=[]), partial(hazard_01, faults=[LOST_RESPONSE])]


@pytest.mark.parametrize("schedule", [*SLOTS, partial(a_neighbours_schedule, faults=[]), a_fence_in_a_collected_slot])
def test_hazard_01_mutant_without_the_floor_check(schedule, monkeypatch):
    async def trust(reader: LogReader, *, lenient: bool = False) -> bool:
        del lenient
        reader.state = reader.head
        return True

    async def scenario(world: World) -> None:
        world.store("warm-up")
        monkeypatch.setattr(LogReader, "confirm", trust)
        await schedule(world)

    with caught():
        simulate(scenario)


async def hazard_01_undecided(world: World, first: Fault) -> None:
    """The producer's create is not decided while others fill, consume and delete its slot and those behind it; then it sends
    the same bytes to the same slot again.
    """
    store = world.store("sleeper")
    async with world.producer("sleeper", store) as sleeper:
        await append(sleeper, 0)
        await sleeper.flush()
        store.plan = away_between(trio.current_time(), trio.current_time() + 60.0, first)
        await append(sleeper, 1)
        await trio.sleep(20.0)
        async with world.producer("busy") as busy:
            for number in range(20):
                await append(busy, number)
                await busy.flush()
                if number == 9:
                    await reclaim_below(world, 5)
        await reclaim_below(world, 15)
        assert trio.current_time() < 60.0, "all that happened while nobody answered the sleeper"
        await sleeper.flush()
        assert (sleeper.tally.undecided > 0, sleeper.tally.lost) == (True, 1)
        assert world.ledger.published["sleeper"] == 2, "what `flush` returned is in the log"
    assert world.ledger.counts["zombie slots"] == 1, "the sleeper did take a deleted slot"
    world.check(sleeper=2, busy=20)


@pytest.mark.logs("trying on for")
@pytest.mark.parametrize("first", [LOST_REQUEST, LOST_RESPONSE], ids=["never landed", "landed at once"])
def test_hazard_01_after_an_undecided_create(first: Fault) -> None:
    simulate(lambda world: hazard_01_undecided(world, first))


@pytest.mark.logs("trying on for")
def test_hazard_01_mutant_that_believes_an_undecided_create(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided_is_believed(monkeypatch)
    with caught():
        simulate(lambda world: hazard_01_undecided(world, LOST_REQUEST))


async def one_commit(world: World, script: Sequence[tuple[str, str, Fault]]) -> CommitStats:
    plan = Scripted([])
    store = world.store("p", plan)
    async with world.producer("p", store) as producer:
        plan.left = list(script)
        await feed(producer, 3)
        await producer.flush()
        await feed(producer, 5)
    assert not plan.left, "every fault happened"
    await world.settle()
    world.check(p=5)
    return producer.tally


@pytest.mark.parametrize("fault", [OWN_412, LOST_RESPONSE, RESET_AFTER, ERROR_500_APPLIED])
def test_hazard_02_own_success_read_as_conflict(fault: Fault) -> None:
    tally = simulate(lambda world: one_commit(world, [("create", "log/", fault)]))
    assert tally.lost == 0


@pytest.mark.parametrize("fault", [OWN_412, RESET_AFTER])
def test_hazard_02_is_caught_by_the_guard_as_well(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a writer that takes its own success for a conflict drops what its head shows as committed."""
    monkeypatch.setattr(commit_loop, "take_slot", trusting_take_slot)
    tally = simulate(lambda world: one_commit(world, [("create", "log/", fault)]))
    assert tally.lost == 1


def test_hazard_02_mutant_without_reading_the_slot_and_without_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "take_slot", trusting_take_slot)
    monkeypatch.setattr(commit_loop, "rebase", forgetful_rebase)
    with caught():
        simulate(lambda world: one_commit(world, [("create", "log/", RESET_AFTER)]))


@pytest.mark.parametrize("fault", [CONFLICT_409, ERROR_500, RESET_BEFORE, LOST_REQUEST])
def test_hazard_03_409_is_retried_in_the_same_slot(fault: Fault) -> None:
    tally = simulate(lambda world: one_commit(world, [("create", "log/", fault)] * 3))
    assert (tally.lost, tally.undecided) == (0, 0)


def test_hazard_03_a_412_for_a_free_slot_is_followed_by_a_fresh_look() -> None:
    tally = simulate(lambda world: one_commit(world, [("create", "log/", FALSE_412)]))
    assert tally.lost == 1


def test_hazard_03_mutant_that_takes_a_409_for_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "take_slot", trusting_take_slot)
    tally = simulate(lambda world: one_commit(world, [("create", "log/", CONFLICT_409)]))
    assert tally.lost > 0, "the count in test_hazard_03 finds it"


def away_between(start_s: float, end_s: float, first: Fault):
    """The first commit meets `first`; from then until `end_s` nothing else is answered."""
    script = Scripted([("create", "log/", first)])

    def plan(verb: str, key: str, rng: object) -> Fault | None:
        now_s = trio.current_time()
        if now_s < start_s:
            return None
        if script.left:
            return script(verb, key, rng)  # type: ignore[arg-type]
        return RESET_BEFORE if now_s < end_s and verb != "put" else None

    return plan


async def hazard_05(world: World) -> None:
    """{0, 1} is sent, the store falls silent, {0 … 3} is pending when {0, 1} lands late."""
    store = world.store("p", away_between(10.0, 60.0, delayed(20.0)))
    async with world.producer("p", store) as producer:
        await trio.sleep_until(20.0)
        for number in range(2):
            await append(producer, number)
        await trio.sleep_until(30.0)
        for number in range(2, 4):
            await append(producer, number)
        await producer.flush()
        assert producer.tally.undecided > 0
    await world.settle()
    assert world.ledger.counts["landed late"] == 1
    world.check(p=4)


@pytest.mark.logs("trying on for")
def test_hazard_05_pending_grew_after_unknown() -> None:
    simulate(hazard_05)


@pytest.mark.logs("trying on for")
def test_hazard_05_mutant_that_clears_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = CommitWindow.committed_below

    def clear(pending: CommitWindow, next_seq: int) -> int:
        return drop(pending, max(next_seq, pending.first_seq + pending.ready_tgbs))

    monkeypatch.setattr(CommitWindow, "committed_below", clear)
    with caught():
        simulate(hazard_05)


@pytest.mark.logs("trying on for")
def test_hazard_05_mutant_that_forgets_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    take = commit_loop.Committer._take

    async def forget(
        self: commit_loop.Committer, attempt: commit_loop._Attempt, lost: commit_loop.Lost | None
    ) -> commit_loop.CommitOutcome:
        outcome = await take(self, attempt, lost)
        self._unresolved = None
        return outcome

    monkeypatch.setattr(commit_loop.Committer, "_take", forget)
    monkeypatch.setattr(commit_loop, "rebase", forgetful_rebase)
    with caught():
        simulate(hazard_05)


async def hazard_06(world: World) -> None:
    """A producer is away so long that nothing of it is left but its state."""
    async with world.producer("away") as producer:
        await feed(producer, 3)
    async with world.producer("busy") as busy:
        await feed(busy, 2100)
        await busy.flush()
    await reclaim_below(world, 2050)
    async with world.producer("away") as producer:
        assert (producer.position, producer.next_seq) == (3, 3)
        await feed(producer, 5)
    world.check(away=5, busy=2100)


def test_hazard_06_producer_state_never_expires() -> None:
    simulate(hazard_06)


def test_hazard_06_mutant_that_expires_idle_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = snapshot_format.encode_snapshot

    def expire(state: LogState) -> bytes:
        recent = {name: known for name, known in state.producers.items() if state.version - known.version < 3}
        return keep(replace(state, producers=recent))

    monkeypatch.setattr(log_snapshots, "encode_snapshot", expire)
    with caught():
        simulate(hazard_06)


async def hazard_07(world: World) -> list[str]:
    """The lake is dropped and another one made under the same URL, with a producer still at work."""
    operator = world.store("operator")
    new_id = ""
    with pytest.raises(RefusedError, match="recreated"):
        async with world.producer("p") as producer:
            await append(producer, 0)
            await producer.flush()
            await operator.delete([entry.key for entry in await operator.list("")])
            new_id = (await create_lake(operator, slices=SLICES)).lake_id
            for number in range(1, 100):
                await producer.append([payload("p", number, i) for i in range(SLICES)], position=number)
                await producer.flush()
                await trio.sleep(IDENTITY_CHECK_S / 20)
    return [entry.key for entry in await operator.list("") if entry.key.startswith(new_id)]


def test_hazard_07_a_recreated_lake_is_noticed_and_never_written_to() -> None:
    assert simulate(hazard_07) == []


def test_hazard_07_mutant_that_never_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_loop, "IDENTITY_CHECK_S", float("inf"))
    never_looks_back(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        simulate(hazard_07)


@scenario(simulate)
async def test_hazard_07_a_dropped_lake_is_noticed(world: World) -> None:
    operator = world.store("operator")
    with pytest.raises(Exception, match="not a lake") as caught:
        async with world.producer("p") as producer:
            await operator.delete([LAKE])
            await trio.sleep(IDENTITY_CHECK_S)
            await append(producer, 0)
    assert type(caught.value).__name__ == "AbsentError"


def test_hazard_08_no_two_uploads_share_a_name() -> None:
    """Two images of one process (fork, restored checkpoint) upload the same seq: neither overwrites the other."""

    async def scenario(world: World) -> set[str]:
        me = Incarnation("p", Epoch(1), b"i" * 16)
        item = Item(0, (b"x",), (1,), b"", 1)
        writers = [TgbWriter(world.store("p"), world.identity, me, at_once=1) for _ in range(2)]
        return {(await writer.write(item, writer.new_key(item))).key for writer in writers}

    assert len(simulate(scenario)) == 2


@scenario(simulate)
async def test_hazard_11_a_snapshot_is_of_a_committed_state_only(world: World) -> None:
    """What is handed to the snapshot writer is the state after a commit that passed the floor check."""
    async with world.producer("p") as producer:
        await feed(producer, 1100)
    store = world.store("reader")
    snapshots = await store.list(f"{world.identity.lake_id}/snapshot/")
    assert snapshots
    reader = await LogReader.open(store, world.identity)
    assert reader.state.digest == world.ledger.digests[-1]


async def hazard_09(world: World, others: int) -> float:
    """That many contenders in view, the longest jitter, and one record: how long until it can be read?"""
    async with world.producer("p", max_delay=3.0) as producer:
        await append(producer, 0)
        await producer.flush()
        pacer = producer._pacer
        pacer._draw = lambda _low, high: high
        pacer.others = others
        for _ in range(9):
            pacer.won(started_s=trio.current_time(), exposure_s=0.02)
        appended_s = trio.current_time()
        await append(producer, 1)
        await producer.flush()
        return trio.current_time() - appended_s


def test_hazard_09_adaptive_batching_flushes_within_its_bound() -> None:
    assert 2.0 < simulate(lambda world: hazard_09(world, 29)) < 3.1


def test_hazard_09_a_bound_shorter_than_the_pace_becomes_the_pace() -> None:
    assert 15.0 < simulate(lambda world: hazard_09(world, 150)) < 15.0 * 1.15 + 0.5


@pytest.mark.logs("move it nearer to the store")
def test_a_producer_that_loses_all_the_time_says_so_once(monkeypatch, caplog):
    async def scenario(world: World) -> None:
        async with trio.open_nursery() as nursery:
            for who in "abcdefgh":
                nursery.start_soon(one, world, who)

    async def one(world: World, who: str) -> None:
        async with world.producer(who) as producer:
            await feed(producer, 20, pause_s=0.3)

    simulate(scenario)
    assert "move it nearer" not in caplog.text, "losing now and then is usual"
    monkeypatch.setattr(commit_loop, "LOSSES_WORTH_SAYING", 1)
    simulate(scenario)
    told = [record.args[0] for record in caplog.records if "move it nearer" in record.msg]
    assert 0 < len(told) == len(set(told))


def test_hazard_09_mutant_that_only_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pacer, "gives_way", True)
    with monkeypatch.context() as silent:
        silent.setattr(CommitLoop, "_say_if_giving_way", lambda _loop: None)
        assert simulate(lambda world: hazard_09(world, 29)) > 3.1


@pytest.mark.logs("raise max_delay")
@scenario(simulate)
async def test_hazard_09_a_bound_that_gives_way_to_the_pacing_is_said_once(world: World, caplog):
    async def other(world: World, who: str) -> None:
        async with world.producer(who) as producer:
            await feed(producer, 1)

    async with world.producer("p", max_delay=0.0) as producer:
        await append(producer, 0)
        await producer.flush()
        async with trio.open_nursery() as nursery:
            for who in "abcdefgh":
                nursery.start_soon(other, world, who)
        for number in range(1, 4):
            await append(producer, number)
            await producer.flush()
        assert producer.pacing.gives_way
        assert producer.pacing.others == 8
    assert sum(str(record.args).startswith("('p',") for record in caplog.records) == 1


class LyingStore(ProcessStore):
    """Answers every create with success and overwrites, as `rclone serve s3` does (hazard 4)."""

    async def create(self, key: str, body: bytes) -> Put:
        self.shared.remove(key)
        return await super().create(key, body)


async def hazard_04(world: World) -> None:
    """Two producers on a store that ignores conditions: neither may start."""
    async with trio.open_nursery() as nursery:
        for who in ("x", "y"):
            nursery.start_soon(_produce, world, who)
    world.check(**world.ledger.published)


async def _produce(world: World, who: str) -> None:
    with pytest.raises(RefusedError, match="honours conditional"):
        async with world.producer(who, LyingStore(world.shared, actor=who)) as producer:
            await feed(producer, 5)


def test_hazard_04_a_store_that_ignores_conditions_is_refused() -> None:
    small(hazard_04, on=grow)

    async def no_lake(world: World) -> None:
        world.shared.remove(LAKE)
        with pytest.raises(RefusedError, match="honours conditional"):
            await create_lake(LyingStore(world.shared, actor="liar"), slices=1)

    small(no_lake, on=grow)


def test_mutant_04_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def believe(store: Store, *, thorough: bool) -> None:
        """Never probe."""

    monkeypatch.setattr("stepfs_producer.commit.loop.probe_store", believe)
    with pytest.raises(BaseExceptionGroup) as found:
        small(hazard_04, on=grow)
    assert found.group_contains(pytest.fail.Exception) or found.group_contains(AssertionError)


def test_a_lake_that_a_false_412_refused_is_said_to_be_tried_again() -> None:
    """Seed 3001189: it was called another process's, and the simulated fork took that for an answer."""

    async def refused(world: World) -> None:
        world.shared.remove(LAKE)
        store = ProcessStore(world.shared, actor="founder", plan=Scripted([("create", LAKE, FALSE_412)]))
        with pytest.raises(RefusedError, match="or the store erred; try again"):
            await create_lake(store, slices=1)
        await create_lake(store, slices=1)

    small(refused, on=grow)


class Revived(FaultyStore):
    """The put of the probe's read timed out and was made again: late attempts undo the next deletes of its key."""

    late = 0

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        bodies = {key: self.shared.objects.get(key, b"") for key in keys}
        await super().delete(keys)
        for key, body in bodies.items():
            if self.late > 0 and len(body) > 1000:  # no other object of the probe is as long
                self.late -= 1
                self.shared.put(key, body)


@pytest.mark.parametrize(("late", "seen"), [(2, ""), (99, "a deleted object is still there")])
def test_a_probe_looks_again_when_late_puts_undo_a_delete(late: int, seen: str) -> None:
    """Seed 9973401: a sound store was refused for an attempt of 40 s before. One that deletes nothing is refused still."""

    async def probed(world: World) -> None:
        store = Revived(world.shared, actor="founder")
        store.late = late
        assert [check.seen for check in (await examine_store(store)).checks if not check.passed] == [seen] * bool(seen)

    small(probed, on=grow)


async def hazard_08_append(world: World) -> None:
    """A child process goes on with its parent's producer."""
    async with world.producer("p") as producer:
        await append(producer, 0)
        await producer.flush()
        with pytest.MonkeyPatch.context() as child:
            child.setattr(producer_room.os, "getpid", lambda: 1)  # type: ignore[attr-defined]
            with pytest.raises(RefusedError, match="after a fork"):
                await append(producer, 1)


async def hazard_08_upload(world: World) -> None:
    """Both images upload the same seq of the same epoch, with different bytes."""
    me = Incarnation("p", Epoch(1), b"i" * 16)
    for body in (b"parent", b"child"):
        writer = TgbWriter(world.store("p"), world.identity, me, at_once=1)
        item = Item(0, (body, body), (1, 1), b"", 2 * len(body))
        await writer.write(item, writer.new_key(item))
    found = sorted(body.find(b"parent") > 0 for key, body in world.shared.objects.items() if ".tgb" in key)
    assert found == [False, True]


def no_look_at_the_pid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(producer_room.os, "getpid", lambda: 1)  # type: ignore[attr-defined]


def predictable_names(patch: pytest.MonkeyPatch) -> None:
    def key(lake_id: str, producer_id: str, epoch: Epoch, seq: int) -> str:
        return f"{lake_id}/data/{component(producer_id)}/{epoch:010d}-{seq:016d}-{0:016x}.tgb"

    patch.setattr(producer_room, "data_key", key)


@pytest.mark.parametrize("scenario", [hazard_08_append, hazard_08_upload])
def test_hazard_08_a_second_image_of_a_producer(scenario: Callable[..., object]) -> None:
    simulate(scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mutate", "scenario"), [(no_look_at_the_pid, hazard_08_append), (predictable_names, hazard_08_upload)]
)
def test_mutant_08_is_found(mutate, scenario, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        simulate(scenario)  # type: ignore[arg-type]
