"""`stepfs seal`: no more steps will come."""

import typer

from stepfs._internal import interruption
from stepfs.cli.options import EndpointUrl, Lake
from stepfs.cli.target import opened_log
from stepfs.store.api import StoreOptions


def seal(lake: Lake, endpoint_url: EndpointUrl = None) -> None:
    """Declare the lake complete: producers stop, and every wait for more steps ends with ENOENT."""
    from stepfs._internal.clock import SystemClock
    from stepfs.lake.log import append

    async def end() -> None:
        async with opened_log(lake, StoreOptions(endpoint_url)) as log:
            fresh = await append.seal(log, SystemClock())
            typer.echo(f"{'sealed' if fresh else 'already sealed'}: {log.state.next_step} steps")

    interruption.run(end)
