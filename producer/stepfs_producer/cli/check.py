"""`stepfs-produce check`: whether a plan is right, and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, not_empty
from stepfs.declared_option import Opt
from stepfs.store.api import StoreOptions
from stepfs_producer.cli.options import Holdout
from stepfs_producer.run.options import RunOptions


def check(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="YAML file of the plan; not needed with --schema.")
    ] = None,
    lake: Annotated[
        str | None,
        typer.Argument(
            metavar="[LAKE]", help="Compare this lake with the plan, too.", callback=not_empty, show_default=False
        ),
    ] = None,
    *,
    producer_id: Annotated[
        str, Opt("--producer-id", "The producer id of the run to compare with LAKE.", "ID")
    ] = "plan",
    accept_changes: Annotated[bool, Opt("--accept-changes", "Compare as a run with this option does.")] = False,
    holdout: Holdout = False,
    schema: Annotated[bool, Opt("--schema", "Print the JSON Schema of plan files, for editors.")] = False,
    no_sources: Annotated[
        bool, Opt("--no-sources", "Look at the text of the plan alone: open no file, import no function.")
    ] = False,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Report every mistake in PLAN with its line, then shares, files, bytes, epochs, slices and memory. Writes nothing.

    With LAKE: refuse what a run would refuse before it starts."""
    from stepfs.errors import UsageError

    if schema:
        from stepfs_producer.cli.plans.check_report import schema_text

        typer.echo(schema_text())
        return
    if plan is None:
        raise UsageError("no plan was named; name its YAML file, or give --schema")
    from stepfs_producer.cli.plans.check_report import check_plan

    if lake is not None and no_sources:
        raise UsageError("a lake is compared with sources, too; leave out --no-sources, or LAKE")
    options = None
    if lake is not None:
        at = StoreOptions(endpoint_url)
        options = RunOptions(lake, producer_id=producer_id, accept_changes=accept_changes, store_options=at)
    typer.echo(check_plan(plan, options, held_out=holdout, sources=not no_sources, as_json=as_json))
