"""`stepfs-produce simulate`: shares, fill and balance of the first steps of a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs.cli.options import Json
from stepfs_producer.cli.options import Holdout, PlanFile, Workers


def simulate(
    plan: PlanFile,
    steps: Annotated[  # without a variable: STEPFS_STEPS is what a mount shows
        int, typer.Option("--steps", help="Plan the first N steps, or to the end.", metavar="N", min=1)
    ] = 100,
    workers: Workers = None,
    holdout: Holdout = False,
    as_json: Json = False,
) -> None:
    """Plan the first steps of PLAN over its real records, without a lake: shares, fill, balance, padding, planning time."""
    from stepfs_producer.cli.plans.run_report import simulation_report

    typer.echo(simulation_report(plan, steps=steps, workers=workers, held_out=holdout, as_json=as_json))
