"""`stepfs checkpoint`: record in the lake which durable checkpoints a training run keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text
from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory
from stepfs.cli.target import is_lake, opened_log
from stepfs.errors import NoSuchGroupError, UsageError
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.format.control import GroupRecord


def checkpoint(
    target: LakeOrDirectory,
    next_step: Annotated[
        int, typer.Argument(metavar="NEXT", min=0, help="First step still needed when resuming from the checkpoint.")
    ],
    *,
    group: Annotated[str, Opt("--group", "The training run.", "NAME", environ=True)],
    keep: Annotated[
        int | None, Opt("--keep", "Of the checkpoints at or below NEXT, keep the K recorded last.", "K", least=1)
    ] = None,
    resumed: Annotated[
        bool,
        Opt(
            "--resumed",
            "Training goes on from the checkpoint at NEXT, which is kept; greater ones stay until it has passed them.",
        ),
    ] = False,
    drop: Annotated[bool, Opt("--drop", "The checkpoint at NEXT is gone.")] = False,
    new_group: Annotated[
        bool, Opt("--new-group", "Make the group if it does not exist; it then keeps data until it is retired.")
    ] = False,
    pace: Annotated[
        bool,
        Opt("--pace", "Training is at NEXT: producers' lead (max_lead) counts from there, and no step is held for it."),
    ] = False,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Record that a durable checkpoint exists that resumes at step NEXT.

    Steps that no kept checkpoint of any group needs may then be reclaimed. Say it only after the checkpoint is safe.
    """
    from stepfs.checkpoints.record import check_on_mount, record_checkpoint
    from stepfs.view.mounted import mounted_lake

    if [drop, resumed, pace, keep is not None].count(True) > 1 or (new_group and drop):
        raise UsageError("give one of --keep K, --resumed, --drop, --pace, and --new-group not with --drop")
    lake, store_options = target, StoreOptions(endpoint_url)
    if not is_lake(target):
        mounted = mounted_lake(Path(target))
        lake, store_options = mounted.lake, store_options.at_endpoint(mounted.endpoint_url)
        if not (drop or resumed or pace):
            check_on_mount(next_step, Path(target))

    async def change() -> tuple[str, GroupRecord]:
        async with opened_log(lake, store_options) as log:
            recorded = partial(
                record_checkpoint, keep=keep, drop=drop, resumed=resumed, creates=new_group, by_hand=True, pace=pace
            )
            return log.identity.lake_id, await recorded(log.control, log.state.next_step, group, next_step)

    try:
        lake_id, record = interruption.run(change)
    except NoSuchGroupError as error:
        if drop:
            raise
        raise NoSuchGroupError(f"{error}; `--new-group` makes a new one") from error
    kept = list(record.kept)
    if as_json:
        facts = {"lake": redact_url(lake), "lake_id": lake_id, "group": group, "need": record.need, "kept": kept}
        typer.echo(json_text(facts, indent=None))
    elif pace:
        typer.echo(f"run {group} is at step {record.need}; producers with a bounded lead keep near it")
    else:
        typer.echo(f"group {group} needs steps from {record.need} on (checkpoints kept: {kept or 'none'})")
