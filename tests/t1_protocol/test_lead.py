"""Held back by `max_lead`: what waiting costs, how it ends, and when it would never end."""

from __future__ import annotations

import pytest
import trio
from producer_world import World, append, feed, simulate

from stepfs.format.ids import Step
from stepfs.format.keys import control_prefix
from stepfs.lake.groups import Group
from stepfs_producer.lead.limit import LONG_S, LOOK_JITTER, LOOK_S_MAX

LEAD = 10


async def groups(world: World, count: int) -> list[Group]:
    found = [Group.of(world.store("trainer"), world.identity, f"g{number}") for number in range(count)]
    for group in found:
        await group.add(Step(0))
    return found


def looks(world: World, actor: str = "p") -> int:
    """Requests for the control sequence by producers: looks at the groups, and one for each commit."""
    prefix = control_prefix(world.identity.lake_id)
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

    assert LEAD <= simulate(scenario) <= 2 * LEAD + 35, "one request a look, however many groups"


def test_a_checkpoint_releases_a_producer_that_was_held_for_long() -> None:
    async def scenario(world: World) -> None:
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

    simulate(scenario)


@pytest.mark.logs("held back by max_lead")
@pytest.mark.parametrize(("seconds", "warnings"), [(LONG_S - 60, 0), (3 * LONG_S, 1)])
def test_a_long_hold_names_what_to_check_once(
    seconds: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        await groups(world, 1)
        await held(world, "p", seconds=seconds)

    simulate(scenario)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == warnings
    for line in told:
        assert "max_lead (10)" in line
        assert "'g0' needs step 0, 10 steps are committed" in line
        assert "steps between two of its checkpoints" in line


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
