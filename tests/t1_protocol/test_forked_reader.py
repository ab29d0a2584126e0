"""A reader that goes on from the log as another one, in the process it was forked from, has published it."""

from __future__ import annotations

import pytest
from process_store import ProcessStore
from producer_world import World, feed
from small_world import grow, inside_everywhere, process, small
from test_reader_hazards import nothing, reaches_the_end, zombies_everywhere

from stepfs.lake.log.reader import LogReader

CONFIRM = 3  # requests of the first look at the control sequence: a LIST, the newest record, the one behind it


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_forked_reader_reads_only_what_is_new(more: int) -> None:
    async def fork(world: World) -> None:
        reader = await LogReader.open(process(world, "reader"), world.identity)
        async with world.producer("d") as producer:
            await feed(producer, more)
        worker = process(world, "worker")
        forked = await LogReader.continued(worker, world.identity, reader.state)
        assert forked.state == (await LogReader.open(process(world, "new"), world.identity)).state
        assert forked.first_live_step == reader.first_live_step
        assert worker.counts.requests == 1 + CONFIRM + forked.state.version - reader.state.version

    small(fork, on=grow)


async def hazard_01(world: World, store: ProcessStore) -> None:
    known = (await LogReader.open(process(world, "reader"), world.identity)).state
    await reaches_the_end(world, await LogReader.continued(store, world.identity, known))


def test_hazard_01_inside_every_await_of_going_on() -> None:
    assert inside_everywhere(grow, hazard_01, zombies_everywhere, nothing) > 2
