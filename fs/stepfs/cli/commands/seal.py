"""`stepfs seal`: no more steps will come."""

from __future__ import annotations

import typer

from stepfs.cli.options import EndpointUrl, Lake
from stepfs.store.options import StoreOptions


def seal(lake: Lake, endpoint_url: EndpointUrl = None) -> None:
    """Declare the lake complete: producers stop, and every wait for more steps ends with ENOENT."""
    import trio

    trio.run(_seal, lake, StoreOptions(endpoint_url))


async def _seal(lake: str, store_options: StoreOptions) -> None:
    from stepfs.cli.target import opened_log
    from stepfs.clock import SystemClock
    from stepfs.lake.log.append import seal as append_seal

    async with opened_log(lake, store_options) as log:
        fresh = await append_seal(log, SystemClock())
        typer.echo(f"{'sealed' if fresh else 'already sealed'}: {log.state.next_step} steps")
