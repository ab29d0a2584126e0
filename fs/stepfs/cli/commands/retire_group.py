"""`stepfs retire-group`: end a training run, so that it holds nothing back."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs._internal import interruption
from stepfs.cli.columns import json_text
from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.cli.target import opened_log
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions


def retire_group(
    lake: Lake,
    name: Annotated[str, typer.Argument(metavar="GROUP", help="As `stepfs status` shows it.")],
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Declare that a training run is over: it holds no step back.

    Steps that no other group needs may then be reclaimed, and the checkpoints that the run kept no longer hold theirs.
    """
    from stepfs.format.identity import check_id
    from stepfs.lake.control import Group

    async def retire() -> str:
        async with opened_log(lake, StoreOptions(endpoint_url)) as log:
            await Group(log.control, check_id(name, "group")).retire()
            return log.identity.lake_id

    lake_id = interruption.run(retire)
    if as_json:
        typer.echo(json_text({"lake": redact_url(lake), "lake_id": lake_id, "group": name}, indent=None))
    else:
        typer.echo(f"group {name} is retired; it holds nothing back")
