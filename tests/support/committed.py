"""The contents of a lake, read from its objects."""

from __future__ import annotations

import trio

from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store


def committed(lake: str) -> list[tuple[str, list[bytes]]]:
    """(producer, payloads) of every step, in the lake's order."""

    async def read() -> list[tuple[str, list[bytes]]]:
        store = open_store(lake)
        log = await LogReader.open(store, await open_lake(store))
        steps = []
        for number in range(log.state.next_step):
            entry = await log.entry(Step(number))
            data = await store.get(entry.tgb.key)
            assert data is not None
            refs = [entry.tgb.slice(SliceIndex(n)) for n in range(entry.tgb.slices)]
            steps.append((entry.producer_id, [data[ref.offset : ref.offset + ref.length] for ref in refs]))
        await store.aclose()
        return steps

    return trio.run(read)
