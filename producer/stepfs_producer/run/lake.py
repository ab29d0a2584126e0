"""The lake to produce into: opened, or created by the first of several producers that start at once.

Also the positions of its producers, without becoming one (opening a producer id fences the process that has it), and what
a run keeps in a lake besides steps: the text of each plan, and the frozen listing of each source. Both are named by their
digests and created if absent, so two runs that keep the same write the same bytes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import trio

from stepfs.errors import AbsentError, CorruptError, RefusedError, SealedError, StoreSilentError, StoreUnreachableError
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Epoch
from stepfs.format.keys import LAKE, libraries_key, source_listing_key
from stepfs.format.planned import Listing
from stepfs.lake.create_once import Mine, Unknown, take_slot
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.kept_plans import kept_listing
from stepfs.lake.log.reader import LogReader
from stepfs.store import silence
from stepfs.store.api import Store
from stepfs_producer.commit.uploads import unpack_position

_LIBRARIES: Final = ("stepfs", "numpy", "tokenizers", "jinja2", "pyarrow", "zstandard", "torch", "pillow")


async def ensure_lake(store: Store, grid: Grid, ext: str) -> LakeIdentity:
    """Identity of the lake, whatever it holds; a new one has this grid and extension."""
    try:
        return await open_lake(store)
    except AbsentError:
        return await _create_or_open(store, grid, ext)


def sealed_error(lake: str) -> SealedError:
    return SealedError(f"{lake}: the lake is sealed; no more steps can be produced into it")


def committed_positions(log: LogReader) -> dict[str, object]:
    """Producer id → the position of its last commit, of every producer that has committed."""
    positions = {}
    for producer_id, known in log.state.producers.items():
        with suppress(CorruptError):  # of another program's producer; its positions are not ours to read
            positions[producer_id] = unpack_position(known.position)
    return {producer_id: position for producer_id, position in positions.items() if position is not None}


async def keep_libraries(store: Store, lake_id: str, digest: str, producer_id: str, epoch: Epoch) -> None:
    """Keep the versions here, with which one incarnation makes its steps."""
    text = json.dumps(libraries())
    await store.put(libraries_key(lake_id, digest, producer_id, epoch), [text.encode()])


async def kept_libraries(
    store: Store, lake_id: str, digest: str, producer_id: str, epoch: Epoch
) -> dict[str, str | None]:
    """Empty if nothing readable was kept."""
    data = await store.get(libraries_key(lake_id, digest, producer_id, epoch))
    try:
        found = json.loads(data or b"")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def libraries() -> dict[str, str | None]:
    """Versions here of everything that bytes of a step may depend on; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


async def keep_listing(store: Store, lake_id: str, listing: Listing) -> None:
    """Keep a listing. A run that names it in a position has kept all of it before."""
    for number, shard in enumerate(listing.to_shards()):
        await keep(store, source_listing_key(lake_id, listing.digest, number), shard)


async def frozen_listing(store: Store, lake_id: str, source: str, digest: str) -> Listing:
    """The kept listing of a source. `AbsentError` if it is not in the lake."""
    listing = await kept_listing(store, lake_id, digest)
    if listing is None:
        raise AbsentError(
            f"the list of files of source {source} is not in the lake; restore its objects sources/{digest}/"
        )
    return listing


async def _create_or_open(store: Store, grid: Grid, ext: str) -> LakeIdentity:
    try:
        return await create_lake(store, slices=grid, ext=ext)
    except RefusedError as refused:
        try:
            return await open_lake(store)  # another producer created it meanwhile
        except AbsentError:
            raise refused from None  # refused for another reason: the store is unfit


async def keep(store: Store, key: str, body: bytes) -> None:
    """Create an object whose name is the digest of its content, unless it is there."""
    outcome = await take_slot(store, key, body)
    if isinstance(outcome, Unknown):
        raise StoreUnreachableError(f"{store.url}: the store stopped answering{outcome.why}; start again")
    if not isinstance(outcome, Mine):
        raise CorruptError(f"{store.url}: {key} holds other bytes than its name says; restore or remove it")


async def notice_silence(store: Store, steps: Callable[[], int]) -> None:
    """Ask the store something small whenever no step comes for a while; `StoreSilentError` in the end.

    Workers upload the steps, so no other request of this program may be under way that would meet the silence.
    """
    while True:
        before = steps()
        await trio.sleep(silence.SAY_AFTER_S)
        if steps() == before:
            try:
                await store.get(LAKE)
            except StoreSilentError:
                raise
            except StoreUnreachableError:
                continue  # an outage is waited out where something is to be sent
