"""The lake to produce into: opened, or created by the first of several producers that start at once.

Also the positions of its producers, without becoming one: opening a producer id fences the process that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from stepfs.cli.target import opened_log, opened_store
from stepfs.errors import AbsentError, CorruptError, RefusedError, UsageError
from stepfs.format.payload.schema import PayloadSchema
from stepfs.format.records import LakeIdentity
from stepfs.lake.identity import create_lake, open_lake
from stepfs.store.api import Store
from stepfs.store.options import StoreOptions
from stepfs_producer.tgb_writer import unpack_position


async def ensure_lake(
    url: str,
    slices: int | None,
    ext: str | None,
    store_options: StoreOptions,
    *,
    check_ext: Callable[[str], object],
    schema: Callable[[str], PayloadSchema] | None = None,
    advice: tuple[str, str] = ("use --slices", "use --ext"),
) -> LakeIdentity:
    """Identity of the lake under `url`. `RefusedError` if it has another number of slices or another extension.

    `check_ext` raises for an extension that cannot be produced, before it becomes that of a new lake. `schema`: of the
    payloads with an extension, recorded in a new lake. `advice`: what gives the right number of slices, and what the
    right extension.
    """
    async with opened_store(url, store_options) as store:
        try:
            identity = await open_lake(store)
        except AbsentError as error:
            if slices is None:
                raise UsageError(f"{url} is not a lake yet; give --slices N to create it") from error
            check_ext(ext or ".safetensors")
            text = None if schema is None else schema(ext or ".safetensors").text()
            identity = await _create_or_open(store, slices, ext or ".safetensors", text)
        if slices is not None and identity.slices != slices:
            raise RefusedError(
                f"{url} has {identity.slices} slices per step, not {slices}; {advice[0]} {identity.slices}"
            )
        if ext is not None and identity.ext != ext:
            raise RefusedError(f"{url} holds {identity.ext} files, not {ext}; {advice[1]} {identity.ext}")
        check_ext(identity.ext)
        return identity


async def committed_positions(url: str, store_options: StoreOptions) -> dict[str, object]:
    """Producer id → the position of its last commit, of every producer that has committed."""
    positions = {}
    async with opened_log(url, store_options) as log:
        for producer_id, known in log.state.producers.items():
            with suppress(CorruptError):  # of another program's producer; its positions are not ours to read
                positions[producer_id] = unpack_position(known.position)
    return {producer_id: position for producer_id, position in positions.items() if position is not None}


async def _create_or_open(store: Store, slices: int, ext: str, schema: str | None) -> LakeIdentity:
    try:
        return await create_lake(store, slices=slices, ext=ext, payload_schema=schema)
    except RefusedError as refused:
        try:
            return await open_lake(store)  # another producer created it meanwhile
        except AbsentError:
            raise refused from None  # refused for another reason: the store is unfit
