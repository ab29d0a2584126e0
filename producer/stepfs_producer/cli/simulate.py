"""`stepfs-produce simulate`: shares, fill and balance of the first steps of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import Json


def simulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="YAML file of the plan.")],
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            envvar="STEPFS_STEPS",
            metavar="N",
            min=1,
            help="Plan the first N steps, or to the end.",
        ),
    ] = 100,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            envvar="STEPFS_WORKERS",
            metavar="N",
            min=1,
            help="Processes that read and tokenise; one per core by default.",
        ),
    ] = None,
    holdout: Annotated[
        bool,
        typer.Option("--holdout", envvar="STEPFS_HOLDOUT", help="Simulate the side that the plan holds out."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Plan the first steps of PLAN over its real records, without a lake: shares, fill, balance, padding, planning time."""
    from stepfs_producer.plan.packages import plan_packages  # noqa: PLC0415

    with plan_packages():
        from stepfs_producer.cli.plans.simulation_report import simulation_report  # noqa: PLC0415

    typer.echo(simulation_report(plan, steps=steps, workers=workers, held_out=holdout, as_json=as_json))
