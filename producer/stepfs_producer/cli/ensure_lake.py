"""The lake to produce into: opened, or created by whichever of several producers started at once gets there first.

And where a producer stands in it, without becoming that producer: who opens one takes its name from a live process.
"""

from __future__ import annotations

from collections.abc import Callable

from stepfs.cli.target import opened_log, opened_store
from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs.format.records import LakeIdentity
from stepfs.lake import create_lake, open_lake
from stepfs.store.api import Store
from stepfs_producer.tgb_writer import unpack_position


async def ensure_lake(
    url: str,
    slices: int | None,
    ext: str | None,
    endpoint_url: str | None,
    *,
    check_ext: Callable[[str], object],
) -> LakeIdentity:
    """Identity of the lake under `url`. `RefusedError` if it has other slices or another extension than asked for.

    `check_ext` raises for an extension that cannot be produced, before it becomes that of a new lake.
    """
    async with opened_store(url, endpoint_url) as store:
        try:
            identity = await open_lake(store)
        except AbsentError as error:
            if slices is None:
                raise UsageError(f"{url} is not a lake yet; give --slices N to create it") from error
            check_ext(ext or ".pt")
            identity = await _create_or_open(store, slices, ext or ".pt")
        if slices is not None and identity.slices != slices:
            raise RefusedError(
                f"{url} has {identity.slices} slices per step, not {slices}; use --slices {identity.slices}"
            )
        if ext is not None and identity.ext != ext:
            raise RefusedError(f"{url} holds {identity.ext} files, not {ext}; use --ext {identity.ext}")
        check_ext(identity.ext)
        return identity


async def committed_position(url: str, producer_id: str, endpoint_url: str | None) -> object:
    """The position of the last commit of `producer_id`, None before its first."""
    async with opened_log(url, endpoint_url) as log:
        known = log.state.producers.get(producer_id)
        return None if known is None else unpack_position(known.position)


async def _create_or_open(store: Store, slices: int, ext: str) -> LakeIdentity:
    try:
        return await create_lake(store, slices=slices, ext=ext)
    except RefusedError as refused:
        try:
            return await open_lake(store)  # another producer created it meanwhile
        except AbsentError:
            raise refused from None  # refused for another reason: the store is unfit
