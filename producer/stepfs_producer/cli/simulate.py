"""`stepfs-produce simulate`: shares, fill and balance of the first steps of a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs.cli.options import Json, opt
from stepfs_producer.cli.options import Holdout, PlanFile, Workers


def simulate(
    plan: PlanFile,
    steps: Annotated[int, opt("--steps", "Plan the first N steps, or to the end.", "N", least=1)] = 100,
    workers: Workers = None,
    holdout: Holdout = False,
    as_json: Json = False,
) -> None:
    """Plan the first steps of PLAN over its real records, without a lake: shares, fill, balance, padding, planning time."""
    from stepfs_producer.cli.plans.run_report import simulation_report

    typer.echo(simulation_report(plan, steps=steps, workers=workers, held_out=holdout, as_json=as_json))
