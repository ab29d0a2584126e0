"""`stepfs retire-producer`: end a producer id that will not come back, so that its leftovers may be deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stepfs._internal import interruption
from stepfs.cli.columns import json_text
from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.cli.target import opened_log
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.format.snapshot import ProducerState


def retire_producer(
    lake: Lake,
    producer_id: Annotated[str, typer.Argument(metavar="ID", help="As `stepfs status` shows it.")],
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Declare that a producer will not come back: reclaim may delete its uncommitted uploads.

    Steps that it committed stay. A process that still runs under this id is fenced: it stops with exit code 7. Starting
    the id again is allowed and goes on from its last commit.
    """
    from stepfs._internal.clock import SystemClock
    from stepfs.lake.log import append

    async def retire() -> tuple[bool, ProducerState, bool, str]:
        async with opened_log(lake, StoreOptions(endpoint_url)) as log:
            fresh = await append.retire_producer(log, producer_id, SystemClock())
            return fresh, log.state.producers[producer_id], log.state.sealed, log.identity.lake_id

    fresh, producer, sealed, lake_id = interruption.run(retire)
    if as_json:
        facts = {
            "lake": redact_url(lake),
            "lake_id": lake_id,
            "producer": producer_id,
            "epoch": producer.epoch,
            "next_seq": producer.next_seq,
            "retired": producer.retired,
            "sealed": sealed,
            "changed": fresh,
        }
        typer.echo(json_text(facts, indent=None))
    elif fresh:
        typer.echo(
            f"retired producer {producer_id!r} at epoch {producer.epoch}, after {producer.next_seq} steps: whoever still "
            "runs under this id is fenced, and the next reclaim deletes what it did not commit"
        )
    elif producer.retired:
        typer.echo(f"producer {producer_id!r} has retired already, after {producer.next_seq} steps")
    else:
        typer.echo("the lake is sealed: nothing to do; reclaim deletes what was not committed before")
