"""A reader that goes on from the log as another one, in the process it was forked from, has published it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from process_store import ProcessStore
from producer_world import World, feed
from scenarios import scenario
from small_world import GROWN, grow, inside_everywhere, process, small
from test_reader_hazards import nothing, reaches_the_end, zombies_everywhere

from stepfs.format.control import RECORD_ID_BYTES, encode_control
from stepfs.format.keys import control_prefix, numbered
from stepfs.lake.log.reader import LogReader

CONFIRM = 3  # requests of the first look at the control sequence: a LIST, the newest record, the one behind it


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_forked_reader_reads_only_what_is_new(more: int) -> None:
    async def fork(world: World) -> None:
        reader = await LogReader.open(process(world, "reader"), world.identity)
        async with world.producer("d") as producer:
            await feed(producer, more)
        worker = process(world, "worker")
        forked = await LogReader.continued(worker, world.identity, reader.knows)
        assert forked.knows == (await LogReader.open(process(world, "new"), world.identity)).knows
        assert forked.first_live_step == reader.first_live_step
        assert worker.counts.requests == 2 + CONFIRM + forked.state.version - reader.state.version

    small(fork, on=grow)


def test_going_on_costs_the_same_after_any_number_of_control_records() -> None:
    """Groups of a lake that nobody commits to: no commit names their records."""

    async def fork(world: World) -> list[int]:
        requests, made = [], GROWN
        record = (await LogReader.open(process(world, "reader"), world.identity)).control.record
        for count in (10, 2_500, 5_000):
            for number in range(made + 1, count):
                body = encode_control(
                    world.identity.lake_id, replace(record, record_id=number.to_bytes(RECORD_ID_BYTES))
                )
                world.shared.put(numbered(control_prefix(world.identity.lake_id), number), body)
            made = count - 1
            reader, worker = await LogReader.open(process(world, "reader"), world.identity), process(world, "worker")
            forked = await LogReader.continued(worker, world.identity, reader.knows)
            assert forked.control.number == made
            requests.append(worker.counts.requests)
        return requests

    assert small(fork, on=grow) == [2 + CONFIRM] * 3


@pytest.mark.parametrize("other", [False, True], ids=["shorter", "another history"])
def test_of_a_log_that_was_rolled_back_a_forked_reader_shows_what_a_new_one_shows(other: bool) -> None:
    """From a copy of the store: a reader that remembered the lost commits would show steps that nobody committed."""

    async def roll_back(world: World) -> None:
        before = await LogReader.open(process(world, "reader"), world.identity)
        old = dict(world.shared.objects)
        async with world.producer("d") as producer:
            await feed(producer, 2)
        known = (await LogReader.open(process(world, "reader"), world.identity)).state
        for key in set(world.shared.objects) - set(old):
            await process(world, "operator").delete([key])
        if other:  # just as long by now
            known = replace(known, version=before.state.version)
        forked = await LogReader.continued(process(world, "worker"), world.identity, known)
        assert forked.state == before.state

    small(roll_back, on=grow)


@scenario(small)
async def test_of_a_lake_without_a_commit_a_forked_reader_shows_the_first(world: World) -> None:
    known = (await LogReader.open(process(world, "reader"), world.identity)).state
    for count in (0, 1):
        async with world.producer("a") as producer:
            await feed(producer, count)
        forked = await LogReader.continued(process(world, "worker"), world.identity, known)
        assert forked.state == (await LogReader.open(process(world, "new"), world.identity)).state
    assert (await LogReader.continued(process(world, "worker"), world.identity, known)).state.next_step == 1


async def hazard_01(world: World, store: ProcessStore) -> None:
    known = (await LogReader.open(process(world, "reader"), world.identity)).state
    await reaches_the_end(world, await LogReader.continued(store, world.identity, known))


def test_hazard_01_inside_every_await_of_going_on() -> None:
    assert inside_everywhere(grow, hazard_01, zombies_everywhere, nothing) > 2
