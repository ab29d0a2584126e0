"""`stepfs seal`: no more steps will come."""

import typer

from stepfs._internal import interruption
from stepfs.cli.columns import json_text
from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.cli.target import opened_log
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions


def seal(lake: Lake, as_json: Json = False, endpoint_url: EndpointUrl = None) -> None:
    """Declare the lake complete: producers stop, and every wait for more steps ends with ENOENT."""
    from stepfs._internal.clock import SystemClock
    from stepfs.lake.log import append

    async def end() -> None:
        async with opened_log(lake, StoreOptions(endpoint_url)) as log:
            fresh = await append.seal(log, SystemClock())
            facts = {
                "lake": redact_url(lake),
                "lake_id": log.identity.lake_id,
                "next_step": log.state.next_step,
                "changed": fresh,
            }
            line = f"{'sealed' if fresh else 'already sealed'}: {log.state.next_step} steps"
            typer.echo(json_text(facts, indent=None) if as_json else line)

    interruption.run(end)
