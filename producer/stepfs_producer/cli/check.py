"""`stepfs-produce check`: whether a plan is right, and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import Json, opt


def check(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="YAML file of the plan; not needed with --schema.")
    ] = None,
    schema: Annotated[bool, opt("--schema", "Print the JSON Schema of plan files, for editors.")] = False,
    no_sources: Annotated[
        bool, opt("--no-sources", "Look at the text of the plan alone: open no file, import no function.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report every mistake in PLAN with its line, then shares, files, bytes, epochs, slices and memory. Writes nothing."""
    from stepfs.errors import UsageError

    if schema:
        from stepfs_producer.cli.plans.check_report import schema_text

        typer.echo(schema_text())
        return
    if plan is None:
        raise UsageError("no plan was named; name its YAML file, or give --schema")
    from stepfs_producer.cli.plans.check_report import check_plan

    typer.echo(check_plan(plan, sources=not no_sources, as_json=as_json))
