"""`stepfs retire-producer`: end a producer id that will not come back, so that its leftovers may be deleted."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.store.options import StoreOptions


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
    import trio

    trio.run(_retire, lake, producer_id, as_json, StoreOptions(endpoint_url))


async def _retire(lake: str, producer_id: str, as_json: bool, store_options: StoreOptions) -> None:
    from stepfs.cli.target import opened_log
    from stepfs.clock import SystemClock
    from stepfs.lake.log.append import retire_producer

    async with opened_log(lake, store_options) as log:
        fresh = await retire_producer(log, producer_id, SystemClock())
        producer, sealed = log.state.producers[producer_id], log.state.sealed
    if as_json:
        from stepfs.format.ids import JSON_SCHEMA

        document = {
            "schema": JSON_SCHEMA,
            "producer": producer_id,
            "epoch": producer.epoch,
            "next_seq": producer.next_seq,
            "retired": producer.retired,
            "sealed": sealed,
            "changed": fresh,
        }
        typer.echo(json.dumps(document))
    elif fresh:
        typer.echo(
            f"retired producer {producer_id!r} at epoch {producer.epoch}, after {producer.next_seq} steps: whoever still "
            "runs under this id is fenced, and the next reclaim deletes what it did not commit"
        )
    elif producer.retired:
        typer.echo(f"producer {producer_id!r} has retired already, after {producer.next_seq} steps")
    else:
        typer.echo("the lake is sealed: nothing to do; reclaim deletes what was not committed before")
