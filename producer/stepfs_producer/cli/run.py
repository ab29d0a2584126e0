"""`stepfs-produce run`: a plan over many sources → balanced steps of a lake."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.store.api import StoreOptions
from stepfs_producer.cli.options import Holdout, PlanFile
from stepfs_producer.run.options import RunOptions


def run(
    plan: PlanFile,
    lake: Lake,
    *,
    holdout: Holdout = False,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
    values: Annotated[dict[str, Any], RunOptions],
) -> None:
    """Run PLAN into LAKE, created when absent; run again after any ending, it continues exactly."""
    from stepfs_producer.cli.plans.run_report import run_and_report
    from stepfs_producer.run.prepare import plan_at

    options = RunOptions(lake, **values, store_options=StoreOptions(endpoint_url))
    if code := run_and_report(plan_at(plan, held_out=holdout), options, as_json=as_json):
        raise typer.Exit(code)
