"""One reader from beginning to end in its loop: open the store, the lake and its log, then run the parts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from stepfs.errors import RefusedError
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.reader.assembly import Assembly
from stepfs.reader.options import LakeOptions
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence

_log = logging.getLogger("stepfs.reader")

OpenStore = Callable[[LakeOptions, Silence], Store]


def _store_of(options: LakeOptions, silence: Silence) -> Store:
    return open_store(options.url, options=options.store_options, silence=silence)


@asynccontextmanager
async def open_reader(
    options: LakeOptions,
    lake_id: str | None = None,
    *,
    open_store: OpenStore = _store_of,
    memory_bytes: int | None = None,
) -> AsyncIterator[Assembly]:
    """The parts of a reader, running. `lake_id`: the lake that must be there.

    Raises before it begins what `stepfs mount` refuses: `AbsentError`, `RefusedError`, `UsageError`,
    `StoreUnreachableError`. Later, inside, only `ReplacedError`.
    """
    silence = Silence(_log.warning)
    store = open_store(options, silence)
    try:
        identity = await open_lake(store)
        if lake_id not in {None, identity.lake_id}:
            raise RefusedError(
                f"{store.url}: here is lake {identity.lake_id}, not {lake_id}: it was replaced"
            )
        log = await LogReader.open(store, identity)
        memory_bytes = options.memory_share if memory_bytes is None else memory_bytes
        assembly = Assembly(options, store, log, memory_bytes=memory_bytes)
        async with assembly.running():
            silence.end()  # a reader that runs survives an outage
            yield assembly
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()
