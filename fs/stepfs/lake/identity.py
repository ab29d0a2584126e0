"""Opening and creating a lake: identity first, because everything else lives under its random id."""

from stepfs._internal.clock import Clock, SystemClock
from stepfs.errors import AbsentError, RefusedError, UsageError, command
from stepfs.format.grid import Grid
from stepfs.format.identity import CHECKED_EXTENSIONS, LakeIdentity, check_ext, decode_lake, encode_lake, is_checkable
from stepfs.format.ids import SLICES_MAX
from stepfs.format.keys import LAKE, new_lake_id
from stepfs.lake.create_once import SlotLost, settled, take_slot
from stepfs.store.api import Store
from stepfs.store.probe import probe_store


async def create_lake(
    store: Store,
    *,
    slices: Grid | int,
    ext: str = ".safetensors",
    check_payload: bool = False,
    clock: Clock | None = None,
    lake_id: str | None = None,
) -> LakeIdentity:
    """Create a lake. Probes the store for honest conditional writes first.

    `slices`: the grid of a step's files, or how many, if each data rank has one.
    `check_payload`: the lake promises that its slices are files of kind `ext`, and producers check it. A fork gives
    `lake_id`, because it fills the lake before the identity makes it exist. Raises `RefusedError` if there is a lake
    already or the store is unfit, `UsageError` for a bad number of slices or extension.
    """
    grid = slices if isinstance(slices, Grid) else Grid(slices)
    check_grid(grid)
    check_ext(ext)
    if check_payload and not is_checkable(ext):
        raise UsageError(
            f"--check-payload: nothing tells a {ext} file from other bytes; leave it out, or use one of "
            + " ".join(CHECKED_EXTENSIONS)
        )
    await refuse_existing(store)
    await probe_store(store, thorough=True)
    now_ms = (clock or SystemClock()).now_ms()
    identity = LakeIdentity(lake_id or new_lake_id(), grid, ext, now_ms, check_payload)
    outcome = await take_slot(store, LAKE, encode_lake(identity))
    if isinstance(settled(outcome, store, "run `stepfs init` again to see"), SlotLost):
        await refuse_existing(store)
        raise RefusedError(
            f"{store.url}: the store refused to create a lake as if one were here, and none is: another process"
            " removed it just now, or the store erred; try again"
        )
    return identity


def check_grid(grid: Grid) -> None:
    """`UsageError` for a grid that no lake can have, in the words of `stepfs init`."""
    if grid.micro == grid.cp == 1:
        if not 0 < grid.ranks <= SLICES_MAX:
            raise UsageError(f"--slices {grid.ranks}: use 1 to {SLICES_MAX}")
    elif min(grid.ranks, grid.micro, grid.cp) < 1 or grid.slices > SLICES_MAX:
        raise UsageError(
            f"--ranks {grid.ranks} --micro-batches {grid.micro} --cp {grid.cp}: use 1 or more of each; a step has at most"
            f" {SLICES_MAX} files, not {grid.slices}"
        )


async def open_lake(store: Store) -> LakeIdentity:
    """Read the identity of an existing lake; `AbsentError` if there is none under the URL."""
    data = await store.get(LAKE, bytes_max=1 << 20)
    if data is None:
        raise AbsentError(
            f"{store.url} is not a lake (it holds no {LAKE}); create one with `{command('stepfs', 'init', store.url, '…')}`"
        )
    return decode_lake(data, f"{store.url}/{LAKE}")


def check_writable(identity: LakeIdentity, url: str) -> None:
    """`RefusedError` for a replica, whose log is that of the lake it copies."""
    if identity.replica_of is not None:
        raise RefusedError(
            f"{url} is a replica: produce to {identity.replica_of}; if that is lost for good: "
            + command("stepfs", "fork", url, "NEW")
        )


async def check_identity(store: Store, identity: LakeIdentity) -> None:
    """Refuse to go on if the lake was dropped, or recreated, under the same URL (hazard 7)."""
    found = await open_lake(store)
    if found.lake_id != identity.lake_id:
        raise RefusedError(
            f"{store.url}: the lake was recreated (it was {identity.lake_id}, now {found.lake_id}); "
            "stop what still uses the old one"
        )


async def refuse_existing(store: Store) -> None:
    try:
        found = await open_lake(store)
    except AbsentError:
        return
    raise RefusedError(f"{store.url} is a lake already ({found.grid}, {found.ext}); use it, or choose another prefix")
