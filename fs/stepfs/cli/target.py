"""The first argument of a command: a lake, opened and closed again, or a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stepfs.errors import AbsentError, RefusedError, UsageError, command

if TYPE_CHECKING:
    from stepfs.lake.kept_plans import LineageReader
    from stepfs.lake.log.reader import LogReader
    from stepfs.lake.origins import OriginStores
    from stepfs.store.api import Store, StoreOptions
    from stepfs.view.mounted import View


def is_lake(argument: str) -> bool:
    """LAKE has a scheme, DIR has none."""
    return "://" in argument


def check_order(lake: str, other: str, *usage: str) -> None:
    """`UsageError` if a command got its lake and its other argument in the wrong order."""
    if not is_lake(lake) and is_lake(other):
        raise UsageError(f"the lake is {other}: write `{command(*usage)}`")


def lake_of(target: str, options: StoreOptions) -> tuple[str, StoreOptions]:
    """The lake that LAKE or DIR names, and how its store is reached.

    `UsageError` that offers a URL if the directory is not a mount, `StepfsError` if its daemon does not answer.
    """
    if is_lake(target):
        return target, options
    from stepfs.store.opening import meant_url
    from stepfs.view.mounted import mounted_lake

    try:
        mounted = mounted_lake(Path(target))
    except AbsentError:
        raise UsageError(
            f"{target!r} is neither a lake nor a mount of one; a lake is a URL, such as {meant_url(target)}"
        ) from None
    return mounted.lake, options.at_endpoint(mounted.endpoint_url)


def view_of(target: str, log: LogReader) -> View:
    """What the mount DIR shows, of whose lake `log` is; of LAKE, what a mount without options would show."""
    from stepfs.view.mounted import View

    if is_lake(target):
        return View.of_log(log)
    view = View.of_mount(Path(target))
    if view.lake_id != log.identity.lake_id:
        raise RefusedError(
            f"{target} shows lake {view.lake_id}, which was replaced by {log.identity.lake_id}: mount it again"
        )
    return view


def watched_store(url: str, options: StoreOptions) -> Store:
    """The store of a URL, for a command: if it does not answer, the command prints a line and then ends (exit code
    6).
    """
    from stepfs.cli.failure import announce
    from stepfs.store.opening import open_store
    from stepfs.store.silence import Silence

    return open_store(url, options=options, silence=Silence(announce))


@asynccontextmanager
async def opened_store(lake: str, options: StoreOptions) -> AsyncIterator[Store]:
    """The store of a lake's URL; `UsageError` that offers the URL when a directory was given instead: a mount's lake."""
    import trio

    if not is_lake(lake):
        mounted, _ = lake_of(lake, options)
        raise UsageError(f"{lake!r} is a mount of {mounted}; name that lake")
    store = watched_store(lake, options)
    try:
        yield store
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()


@asynccontextmanager
async def opened_log(lake: str, options: StoreOptions, *, reads_only: bool = False) -> AsyncIterator[LogReader]:
    """The log of an existing lake, read up to its head; `AbsentError` if there is no lake. `reads_only`: see
    `LogReader.open`.
    """
    from stepfs.lake.identity import open_lake
    from stepfs.lake.log.reader import LogReader

    async with opened_store(lake, options) as store:
        yield await LogReader.open(store, await open_lake(store), reads_only=reads_only)


@asynccontextmanager
async def origin_stores(store: Store, options: StoreOptions) -> AsyncIterator[OriginStores]:
    """The stores of the lakes that `store`'s lake was forked from; `options` are those of the lake itself."""
    import trio

    from stepfs.lake.origins import OriginStores

    origins = OriginStores(store, lambda url: watched_store(url, options.for_origin()))
    try:
        yield origins
    finally:
        with trio.CancelScope(shield=True):
            await origins.aclose()


@asynccontextmanager
async def opened_lineage(lake: str, options: StoreOptions) -> AsyncIterator[LineageReader]:
    from stepfs.lake.kept_plans import LineageReader

    async with opened_log(lake, options, reads_only=True) as log, origin_stores(log.store, options) as origins:
        yield LineageReader(log, origins)
