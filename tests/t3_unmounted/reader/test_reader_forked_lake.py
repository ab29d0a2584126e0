"""A fork of a lake, read without a mount: the steps before the cut come out of the parent."""

from __future__ import annotations

import trio
from shelf import SMALL, commit_on_disk, lake_on_disk, payload

from stepfs import Lake
from stepfs.clock import SystemClock
from stepfs.format.ids import Step
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store


def test_steps_of_the_parent_and_of_the_fork_are_one_sequence(tmp_path):
    parent, child = (tmp_path / "parent").as_uri(), (tmp_path / "child").as_uri()
    lake_on_disk(parent)
    commit_on_disk(parent, range(6))

    async def cut() -> None:
        stores = open_store(parent), open_store(child)
        log = await LogReader.open(stores[0], await open_lake(stores[0]))
        await fork(log, stores[1], Cut(Step(3), Step(3), Step(6)), SystemClock())
        for store in stores:
            await store.aclose()

    trio.run(cut)
    with Lake(child, ranks="0-1") as lake:
        assert lake.next_step == 3
        commit_on_disk(child, range(3, 5), 2 * SMALL)
        for step in lake.follow():
            size = SMALL if step < 3 else 2 * SMALL
            assert [step[rank] for rank in (0, 1)] == [payload(step, rank, size) for rank in (0, 1)]
            if step == 4:
                break
