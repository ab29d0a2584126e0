"""Held back by `max_lead`: what waiting costs, how it ends, and when it would never end."""

from __future__ import annotations

import gc

import pytest
import trio
import trio.testing
from producer_world import World, append, feed, simulate
from scenarios import scenario

from stepfs.format.ids import Step
from stepfs.format.keys import consumers_prefix
from stepfs.format.node import NodeRecord
from stepfs.lake.fleet import write_node
from stepfs.lake.groups import Group
from stepfs.testing.faulty_store import FaultyStore
from stepfs_producer.lead.group_looks import GroupLooks, SlowestGroup
from stepfs_producer.lead.limit import LOOK_JITTER, LOOK_S_MAX

LEAD = 10


async def groups(world: World, count: int) -> list[Group]:
    found = [Group.of(world.store("trainer"), world.identity, f"g{number}") for number in range(count)]
    for group in found:
        await group.add(Step(0))
    return found


def looks(world: World, actor: str = "p") -> int:
    """Requests for the groups by producers."""
    prefix = consumers_prefix(world.identity.lake_id)
    return sum(
        event.actor.startswith(actor) and event.keys[0].startswith(prefix) for event in world.shared.trace
    )


async def held(world: World, who: str, *, seconds: float) -> None:
    async with world.producer(who, max_lead=LEAD) as producer:
        with trio.move_on_after(seconds):
            await feed(producer, 100)
        assert producer.next_seq <= LEAD


def test_a_held_producer_looks_ever_more_rarely() -> None:
    async def scenario(world: World) -> int:
        await groups(world, 10)
        await held(world, "p", seconds=600)
        return looks(world)

    assert 11 <= simulate(scenario) <= 11 * 35


def test_held_producers_of_one_process_share_their_looks() -> None:
    async def scenario(world: World) -> int:
        await groups(world, 10)
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(lambda who: held(world, who, seconds=600), f"p{number}")
        return looks(world)

    # each looks for itself when it starts; then one does for all
    assert simulate(scenario) <= 11 * (20 + 90)


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
        with trio.move_on_after(5.0):
            await append(producer, 2 * LEAD)
        assert producer.next_seq == 2 * LEAD
        before = looks(world)
        with trio.move_on_after(5.0):
            await append(producer, 2 * LEAD)
        assert looks(world) >= before + 2, "short pauses again"


def mount(next_step: int, read_to: int, *, directory: str = "/m") -> NodeRecord:
    return NodeRecord("g0", "host", directory, 1, "1", Step(next_step), Step(read_to), 0, 0)


async def waiting(world: World, records: list[NodeRecord], *, reading: bool = False) -> None:
    """Ten minutes at the bound, beside mounts that say this of themselves."""
    await groups(world, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: held(world, "p", seconds=600))
        store = world.store("mount")
        for turn in range(60):
            for record in records:
                moved = mount(record.next_step + turn, record.read_to + turn, directory=record.directory)
                await write_node(store, world.identity, moved if reading else record)
            await trio.sleep(10.0)


@pytest.mark.logs("held back by max_lead")
def test_a_lead_shorter_than_the_distance_of_checkpoints_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulate(lambda world: waiting(world, [mount(LEAD, LEAD), mount(LEAD, 3, directory="/killed")]))
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "max_lead (10)" in told
    assert "'g0' needs step 0" in told
    assert "read all 10 steps" in told


@pytest.mark.parametrize(
    ("records", "reading"),
    [
        ([mount(LEAD, LEAD - 1)], False),
        ([mount(LEAD, LEAD)], True),
        ([mount(LEAD + 5, LEAD)], False),
        ([], False),
    ],
    ids=["steps left", "others commit", "new steps not opened yet", "no mount says anything"],
)
def test_a_trainer_that_may_still_reach_its_checkpoint_is_no_deadlock(
    records: list[NodeRecord], reading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(lambda world: waiting(world, records, reading=reading))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@scenario(simulate)
async def test_a_look_of_another_thread_is_taken_and_one_from_before_is_not(world: World) -> None:
    await groups(world, 1)
    stores = [FaultyStore(world.shared, actor=f"l{number}") for number in range(3)]
    first, second = GroupLooks(stores[0], world.identity), GroupLooks(stores[1], world.identity)
    assert await first.next() == await second.next() == SlowestGroup("g0", Step(0))
    assert (stores[0].counts.requests, stores[1].counts.requests) == (2, 0)
    await GroupLooks(stores[2], world.identity).next()
    assert stores[2].counts.requests == 2


@scenario(simulate)
async def test_nobody_waits_for_a_look_that_was_killed_or_hangs(world: World) -> None:
    await groups(world, 1)
    one, two = (GroupLooks(world.store(f"l{number}"), world.identity) for number in range(2))
    with trio.move_on_after(0.0005):
        await one.next()
    assert await two.next() == SlowestGroup("g0", Step(0)), "the killed one holds no claim"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.next)  # takes the look of `two`
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one.next)
        await trio.testing.wait_all_tasks_blocked(0.0001)
        assert await two.next() is None
        assert await two.next() is not None


def test_nothing_is_kept_of_a_lake_without_producers() -> None:
    from stepfs_producer.lead import group_looks  # noqa: PLC0415

    async def scenario(world: World) -> str:
        looks_of = GroupLooks(world.store("l"), world.identity)
        assert world.identity.lake_id in group_looks._boards
        del looks_of
        gc.collect()
        return world.identity.lake_id

    assert simulate(scenario) not in group_looks._boards


@pytest.mark.logs("no consumer group is registered, so nothing bounds")
def test_without_groups_a_bound_may_be_none_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        async with world.producer("p", max_lead=LEAD, max_lead_without_groups=False) as producer:
            await feed(producer, 3 * LEAD)
            assert producer.next_seq == 3 * LEAD
            (group,) = await groups(world, 1)
            await trio.sleep(60.0)  # until it looks again
            with trio.move_on_after(600.0):
                await feed(producer, 100)
            assert producer.next_seq == 3 * LEAD
            await group.replace(frozenset({Step(producer.next_seq)}))

    simulate(scenario)
    assert sum("nothing bounds" in line.message for line in caplog.records) == 1
