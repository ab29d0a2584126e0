"""Held back by `max_lead`: what waiting costs, how it ends, and when it would never end."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock
from lakework import reclaim
from producer_world import SLICES, World, append, feed, payload, simulate
from scenarios import scenario

from stepfs.errors import AbsentError, FencedError, OtherHistoryError, RefusedError, SealedError
from stepfs.format.ids import Step
from stepfs.format.keys import control_prefix, log_prefix
from stepfs.lake.control import Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import create_lake
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.backpressure import LOOK_JITTER, LOOK_S_MAX, LOOK_S_MIN, SAY_AFTER_S, SAY_EVERY_S, TRUST_S
from stepfs_producer.run.session import _pace

pytestmark = pytest.mark.logs("held back by max_l")
LEAD = 10
LIVE = 1000  # payload bytes


async def groups(world: World, count: int) -> list[Group]:
    found = [Group.of(world.store("trainer"), world.identity, f"g{number}") for number in range(count)]
    for group in found:
        await group.add(Step(0))
    return found


def looks(world: World, actor: str = "p") -> int:
    """Requests for the control sequence by producers: looks at the groups, and one for each commit."""
    prefix = control_prefix(world.identity.lake_id)
    return sum(event.actor.startswith(actor) and event.keys[0].startswith(prefix) for event in world.shared.trace)


async def held(world: World, who: str, *, seconds: float) -> None:
    async with world.producer(who, max_lead=LEAD) as producer:
        with trio.move_on_after(seconds):
            await feed(producer, 100)
        assert producer.next_seq <= LEAD


def test_a_held_producer_looks_ever_more_rarely() -> None:
    async def scenario(world: World) -> list[float]:
        await groups(world, 10)
        await held(world, "p", seconds=600)
        assert looks(world) <= 2 * LEAD + 35, "one request a look, however many groups"
        control, log = control_prefix(world.identity.lake_id), log_prefix(world.identity.lake_id)
        own = [(event.time_us / 1e6, event.keys[0]) for event in world.shared.trace if event.actor == "p"]
        logs_s = [time_s for time_s, key in own if key.startswith(log)]  # such a look ends with the control sequence
        times_s = [
            time_s
            for time_s, key in own
            if key.startswith(control) and not any(0 < time_s - log_s < 0.1 for log_s in logs_s)
        ]
        return [later - earlier for earlier, later in itertools.pairwise(times_s)]

    pauses_s = [pause_s for pause_s in simulate(scenario) if pause_s > LOOK_S_MIN / 2]
    for number, pause_s in enumerate(pauses_s):
        usual_s = min(LOOK_S_MIN * 2**number, LOOK_S_MAX)
        assert abs(pause_s - usual_s) <= LOOK_JITTER * usual_s + 0.1, pauses_s
    assert len(pauses_s) >= 20


@scenario(simulate)
async def test_a_producer_goes_on_when_the_group_that_holds_it_is_retired(world: World) -> None:
    slow, other = await groups(world, 2)
    await other.replace(frozenset({Step(LEAD)}))
    async with world.producer("p", max_lead=LEAD) as producer:
        with trio.move_on_after(60.0):
            await feed(producer, 100)
        assert producer.next_seq == LEAD
        await slow.retire()
        with trio.fail_after(LOOK_S_MAX * (1 + LOOK_JITTER) + 1):
            await append(producer, LEAD)
        await producer.flush()


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("sealed", SealedError),
        ("replaced", (AbsentError, OtherHistoryError, RefusedError)),
        ("succeeded", FencedError),
    ],
)
def test_a_producer_that_is_held_notices_the_end_of_the_lake(ending: str, error: Any) -> None:
    async def scenario(world: World) -> None:
        await groups(world, 1)
        operator = world.store("operator")
        with pytest.raises(error):
            async with world.producer("p", max_lead=LEAD) as producer:
                with trio.move_on_after(60.0):
                    await feed(producer, 100)
                if ending == "sealed":
                    await seal(await LogReader.open(operator, world.identity), TrioClock())
                elif ending == "succeeded":
                    async with world.producer("p", world.store("its successor")):
                        pass
                else:
                    await operator.delete([entry.key for entry in await operator.list("")])
                    await create_lake(operator, slices=SLICES)
                with trio.fail_after(3600):
                    await append(producer, LEAD)

    simulate(scenario)


@scenario(simulate)
async def test_a_checkpoint_releases_a_producer_that_was_held_for_long(world: World) -> None:
    (group,) = await groups(world, 1)
    async with world.producer("p", max_lead=LEAD) as producer:
        with trio.move_on_after(600.0):
            await feed(producer, 100)
        await group.replace(frozenset({Step(LEAD)}))
        released_s = trio.current_time()
        for number in range(producer.next_seq, 2 * LEAD):
            await append(producer, number)
        assert trio.current_time() - released_s <= LOOK_S_MAX * (1 + LOOK_JITTER) + 1
        await producer.flush()
        before = looks(world)
        with trio.move_on_after(5.0):
            await append(producer, 2 * LEAD)
        assert producer.next_seq == 2 * LEAD
        assert looks(world) >= before + 2, "short pauses again"


@scenario(simulate)
async def test_the_line_of_a_run_says_how_far_it_is_ahead_of_the_slowest_group(world: World) -> None:
    pipeline: Any = SimpleNamespace(bottleneck=lambda _: None)
    async with world.producer("p", max_lead=LEAD) as producer:
        await append(producer, 0)
        assert not _pace(pipeline, producer), "there is no group"
        fast, slow = await groups(world, 2)
        await fast.replace(frozenset({Step(5)}))
        await slow.replace(frozenset({Step(2)}))
        await trio.sleep(2 * TRUST_S)
        for number in range(1, 7):
            await append(producer, number)
        await producer.flush()
        assert _pace(pipeline, producer) == "; lead 5 steps"


@pytest.mark.parametrize(("seconds", "times"), [(SAY_AFTER_S - 2, 0), (SAY_AFTER_S + 2, 1), (SAY_AFTER_S + 182, 4)])
@scenario(simulate)
async def test_a_hold_names_group_and_checkpoint_and_what_to_type(world: World, seconds, times, caplog):
    await groups(world, 1)
    await held(world, "p", seconds=seconds)
    told = warned(caplog)
    assert len(told) == times
    url = world.store("p").url
    for number, line in enumerate(told):
        assert f"{url}: held back by max_lead (10) for {SAY_AFTER_S + number * SAY_EVERY_S:.0f} s: " in line
        assert "group 'g0' needs all from step 0, 10 steps are committed since; let it record a later" in line
        assert (
            f"`stepfs checkpoint {url} --group g0 … --keep 1`, or if it has ended, `stepfs retire-group {url} g0`"
            in line
        )
        assert "--drop" not in line


@scenario(simulate)
async def test_a_group_that_keeps_all_its_checkpoints_is_told_which_to_drop(world: World, caplog):
    """`stepfs checkpoint` without --keep keeps all."""
    (group,) = await groups(world, 1)
    await group.replace(frozenset({Step(0), Step(4), Step(8)}))
    await held(world, "p", seconds=SAY_AFTER_S + 2)
    (line,) = warned(caplog)
    assert "group 'g0' has 3 checkpoints, and the oldest resumes at step 0" in line
    assert "--group g0 0 --drop`" in line
    await group.replace(frozenset({Step(8)}))
    async with world.producer("q", max_lead=LEAD) as producer:
        await feed(producer, 8)
    assert len(warned(caplog)) == 1, "that ends it"


@scenario(simulate)
async def test_a_hold_by_a_ticket_that_is_not_settled_blames_no_group(world: World, caplog):
    """Whoever then dropped the group's checkpoint would lose steps, and the producer would be held as before."""
    (group,) = await groups(world, 1)
    async with world.producer("p", max_lead=LEAD) as producer:
        await feed(producer, 8)
        await producer.flush()
        await group.replace(frozenset({Step(6)}))
        await trio.sleep(2 * TRUST_S)
        await producer.reserve(position=9, payload_bytes=100)
        with trio.move_on_after(SAY_AFTER_S + 2):
            for number in range(9, 100):
                await append(producer, number)
        (line,) = warned(caplog)
        assert "8 appends of this process are not committed yet; all wait for ticket 8, which is not settled" in line
        assert "group" not in line


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "held back" in record.getMessage()]


@scenario(simulate)
async def test_live_bytes_stop_producers_until_a_reclaim_and_cost_no_request(world: World) -> None:
    (group,) = await groups(world, 1)
    async with world.producer("p", max_live_bytes=LIVE) as producer:
        before, commits = looks(world), producer.tally.commits
        for number in range(5):
            await append(producer, number)
            await producer.flush()
        assert looks(world) - before == producer.tally.commits - commits, "each commit's own"
        await fill(producer)
        held_at = producer.next_seq
        assert size_of(0, held_at) <= LIVE < size_of(0, held_at + 1)
        await group.replace(frozenset({Step(4)}))
        await fill(producer)
        assert producer.next_seq == held_at, "a checkpoint alone frees nothing"
        await reclaim(world.store("reclaimer"), world.identity)
        await fill(producer)
        assert size_of(4, producer.next_seq) <= LIVE < size_of(4, producer.next_seq + 1)
        assert producer.next_seq > held_at


@scenario(simulate)
async def test_bytes_that_were_reclaimed_behind_a_held_producers_back_are_no_credit(world: World) -> None:
    """Its last read of the log may be older than what is deleted: what others committed and lost since is not its own."""
    (group,) = await groups(world, 1)
    async with world.producer("p", max_live_bytes=LIVE) as producer, world.producer("q") as other:
        await fill(producer)
        held_at = producer.next_seq
        await feed(other, 50)
        await other.flush()
        await group.replace(frozenset({Step(held_at + 50)}))
        await reclaim(world.store("reclaimer"), world.identity)
        with trio.move_on_after(LOOK_S_MAX * 2):
            for number in range(held_at, 1000):
                await append(producer, number)
                assert size_of(producer.committed_seq, producer.next_seq) <= LIVE
        assert producer.next_seq > held_at


def size_of(first: int, end: int) -> int:
    """Bytes of the payloads of these steps."""
    return sum(len(payload("p", number, index)) for number in range(first, end) for index in range(SLICES))


async def fill(producer: AsyncProducer) -> None:
    """Until the producer is held back."""
    with trio.move_on_after(60.0):
        for number in range(producer.next_seq, 100):
            await append(producer, number)


@scenario(simulate)
async def test_a_full_lake_that_nobody_reclaims_is_said_though_checkpoints_come(world: World, caplog):
    (group,) = await groups(world, 1)
    async with world.producer("p", max_live_bytes=LIVE) as producer:
        await fill(producer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill_for, producer, SAY_AFTER_S + 1)
            for step in range(1, producer.next_seq):
                await trio.sleep(1.0)
                await group.replace(frozenset({Step(step)}))
    told = warned(caplog)
    assert all(f"max_live_bytes ({LIVE})" in line for line in told)
    assert told[-1].endswith(f"; `stepfs reclaim {world.store('p').url}` deletes what no checkpoint needs")


async def fill_for(producer: AsyncProducer, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await feed(producer, 1000)


@scenario(simulate)
async def test_a_bound_below_what_is_live_is_accepted_and_said(world: World, caplog):
    async with world.producer("p") as producer:
        await feed(producer, 3)
    async with world.producer("p", max_live_bytes=1, max_lead_without_groups=False) as producer:
        with trio.move_on_after(600.0):
            await feed(producer, 100)
        assert producer.next_seq == 3
    first, *_ = warned(caplog)
    assert "checkpoint one; `stepfs reclaim " in first


@scenario(simulate)
async def test_a_batch_larger_than_the_bound_may_stand_alone(world: World) -> None:
    async with world.producer("p", max_live_bytes=1) as producer:
        await append(producer, 0)
        await producer.flush()
        assert producer.next_seq == 1


@pytest.mark.logs("no consumer group is registered, so nothing bounds")
@scenario(simulate)
async def test_without_groups_a_bound_may_be_none_and_that_is_said_once(world: World, caplog):
    async with world.producer("p", max_lead=LEAD, max_lead_without_groups=False) as producer:
        await feed(producer, 3 * LEAD)
        assert producer.next_seq == 3 * LEAD
        (group,) = await groups(world, 1)
        await trio.sleep(60.0)  # until it looks again
        with trio.move_on_after(600.0):
            await feed(producer, 100)
        assert producer.next_seq == 3 * LEAD
        await group.replace(frozenset({Step(producer.next_seq)}))
    assert sum("nothing bounds" in line.message for line in caplog.records) == 1


@pytest.mark.logs("no consumer group is registered")
@scenario(simulate)
async def test_several_producers_exceed_the_bound_by_what_each_appends_between_its_looks(world: World):
    async def fills(who: str) -> None:
        async with world.producer(who, max_lead=10) as producer:
            with trio.move_on_after(60.0):
                await feed(producer, 100)

    async with trio.open_nursery() as nursery:
        for who in ("p", "q", "r"):
            nursery.start_soon(fills, who)
    assert 10 < len(world.ledger.steps) <= 30


@scenario(simulate)
async def test_a_producer_does_not_wait_for_a_fork_of_its_lake(world: World) -> None:
    """A fork keeps data; no trainer stands behind its group that would ever move on."""
    (group,) = await groups(world, 1)
    async with world.producer("p", max_lead=LEAD) as producer:
        await feed(producer, 5)
        await producer.flush()
        child = FaultyStore(ObjectMap(), actor="child")
        reader = await LogReader.open(world.store("operator"), world.identity)
        await fork(reader, child, Cut(Step(5), Step(5), Step(5)), TrioClock())
        for step in range(5, 5 * LEAD):
            await group.replace(frozenset({Step(step)}))
            with trio.fail_after(2 * TRUST_S):
                await append(producer, step)


@scenario(simulate)
async def test_a_producer_that_is_full_is_told_of_the_fork_that_holds_the_bytes(world: World, caplog) -> None:
    (group,) = await groups(world, 1)
    async with world.producer("p", max_live_bytes=LIVE) as producer:
        await feed(producer, 3)
        await producer.flush()
        reader = await LogReader.open(world.store("operator"), world.identity)
        child = FaultyStore(ObjectMap(), actor="child")
        identity = await fork(reader, child, Cut(Step(3), Step(3), Step(3)), TrioClock())
        await group.replace(frozenset({Step(3)}))
        with trio.move_on_after(2 * SAY_AFTER_S):
            await feed(producer, 1000)
    assert f"group ':fork/{identity.lake_id}' needs all from step 0" in caplog.text


@scenario(simulate)
async def test_producers_keep_near_a_run_that_records_its_pace_and_its_checkpoints_hold_the_data(world: World) -> None:
    [run] = await groups(world, 1)
    await run.paces(Step(0))
    async with world.producer("p", max_lead=LEAD) as producer:

        async def reaches(count: int) -> None:
            with trio.move_on_after(LOOK_S_MAX * 3):
                await feed(producer, 1000)
            assert producer.next_seq == count

        await reaches(LEAD)
        await run.paces(Step(7))
        await reaches(7 + LEAD)
        await run.paces(Step(5))  # it went back to a checkpoint
        await run.paces(Step(9))
        await reaches(9 + LEAD)
        assert run.control.record.need == 0, "what resume needs stays"
        await run.add(Step(8), keep=1)
        with trio.move_on_after(LOOK_S_MAX * 3):
            await feed(producer, 1000)
        assert producer.next_seq == 9 + LEAD, "checkpoints do not count beside a pace"


@scenario(simulate)
async def test_a_pace_holds_nothing_and_leaves_with_its_run(world: World) -> None:
    run, other = await groups(world, 2)
    await run.paces(Step(0))
    await run.replace(frozenset({Step(20)}))
    await other.replace(frozenset({Step(20)}))
    async with world.producer("p") as producer:
        await feed(producer, 30)
    await run.read()
    assert (run.control.record.need, sorted(run.control.record.paces)) == (20, ["g0"])
    await run.retire()
    assert (sorted(run.control.record.holding), run.control.record.paces) == (["g1"], {})
    await Group.on(run.control, "eval").paces(Step(3))
    assert run.control.record.need == 20
    await Group.on(run.control, "eval").retire()
    assert run.control.record.paces == {}


@scenario(simulate)
async def test_who_is_waited_for_is_said_of_a_pace(world: World, caplog: pytest.LogCaptureFixture) -> None:
    [run] = await groups(world, 1)
    await run.paces(Step(0))
    await held(world, "p", seconds=SAY_AFTER_S * 3)
    [said, *_] = [one.getMessage() for one in caplog.records if "held back by max_lead" in one.getMessage()]
    assert "run 'g0' records its pace, and is at step 0" in said
    assert "--group g0 … --pace" in said
