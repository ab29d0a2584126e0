"""`stepfs checkpoint`: tell the lake which durable checkpoints a training run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory
from stepfs.cli.target import is_lake
from stepfs.errors import UsageError


def checkpoint(
    target: LakeOrDirectory,
    next_step: Annotated[
        int | None,
        typer.Argument(
            metavar="NEXT", min=0, help="First step still needed when resuming from the checkpoint."
        ),
    ] = None,
    *,
    group: Annotated[
        str, typer.Option("--group", envvar="STEPFS_GROUP", metavar="NAME", help="The training run.")
    ],
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", envvar="STEPFS_KEEP", metavar="K", min=1, help="Keep the greatest K; drop others."
        ),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", envvar="STEPFS_DROP", help="The checkpoint at NEXT is gone.")
    ] = False,
    retire: Annotated[
        bool, typer.Option("--retire", envvar="STEPFS_RETIRE", help="The run is over; it holds nothing back.")
    ] = False,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Record that a durable checkpoint exists that resumes at step NEXT.

    Steps that no kept checkpoint of any group needs may then be reclaimed. Say it only after the checkpoint is safe.
    """
    import trio

    from stepfs.checkpoints.record import mounted_lake

    if (
        (next_step is None) != retire
        or (drop and (retire or keep is not None))
        or (retire and keep is not None)
    ):
        raise UsageError("give NEXT (with --keep K or --drop if wanted), or --retire alone")
    lake = target
    if not is_lake(target):
        mounted = mounted_lake(Path(target))
        lake, endpoint_url = mounted.lake, endpoint_url or mounted.endpoint_url
    trio.run(_checkpoint, lake, endpoint_url, group, next_step, keep, drop, as_json)


async def _checkpoint(
    lake: str,
    endpoint_url: str | None,
    name: str,
    next_step: int | None,
    keep: int | None,
    drop: bool,
    as_json: bool,
) -> None:
    from stepfs.checkpoints.record import record_checkpoint
    from stepfs.cli.target import opened_log
    from stepfs.consumers import Group

    async with opened_log(lake, endpoint_url) as log:
        if next_step is None:
            record = await Group.of(log.store, log.identity, name).retire()
        else:
            record = await record_checkpoint(log, name, next_step, keep=keep, drop=drop)
    kept = list(record.kept)
    if as_json:
        document = {"group": name, "need": record.need, "kept": kept, "retired": record.retired}
        typer.echo(json.dumps(document))
    elif record.retired:
        typer.echo(f"group {name} is retired; it holds nothing back")
    else:
        typer.echo(f"group {name} needs steps from {record.need} on (checkpoints kept: {kept or 'none'})")
