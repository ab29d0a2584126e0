"""The lake to produce into: opened, or created by whichever of several producers started at once gets there first."""

from __future__ import annotations

from stepfs.cli.target import opened_store
from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs.format.records import LakeIdentity
from stepfs.lake import create_lake, open_lake
from stepfs.store.api import Store


async def ensure_lake(
    url: str, slices: int | None, ext: str | None, endpoint_url: str | None
) -> LakeIdentity:
    """Identity of the lake under `url`. `RefusedError` if it has other slices or another extension than asked for."""
    async with opened_store(url, endpoint_url) as store:
        try:
            identity = await open_lake(store)
        except AbsentError as error:
            if slices is None:
                raise UsageError(f"{url} is not a lake yet; give --slices N to create it") from error
            identity = await _create_or_open(store, slices, ext or ".pt")
        if slices is not None and identity.slices != slices:
            raise RefusedError(
                f"{url} has {identity.slices} slices per step, not {slices}; use --slices {identity.slices}"
            )
        if ext is not None and identity.ext != ext:
            raise RefusedError(f"{url} holds {identity.ext} files, not {ext}; use --ext {identity.ext}")
        return identity


async def _create_or_open(store: Store, slices: int, ext: str) -> LakeIdentity:
    try:
        return await create_lake(store, slices=slices, ext=ext)
    except RefusedError as refused:
        try:
            return await open_lake(store)  # another producer created it meanwhile
        except AbsentError:
            raise refused from None  # refused for another reason: the store is unfit
