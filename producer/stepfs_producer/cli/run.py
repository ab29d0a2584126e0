"""`stepfs-produce run`: a plan over many sources → balanced steps of a lake."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.store.options import StoreOptions

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan: a YAML file.")]


def run(
    plan: PlanFile,
    lake: Lake,
    producer_id: Annotated[
        str,
        typer.Option(
            "--producer-id",
            envvar="STEPFS_PRODUCER_ID",
            metavar="ID",
            help="Name that a restart continues under. One live process per id.",
        ),
    ] = "plan",
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            envvar="STEPFS_ACCEPT_CHANGES",
            help="Continue although the plan is not the one that the lake's steps were made by.",
        ),
    ] = False,
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
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            envvar="STEPFS_MEMORY",
            metavar="SIZE",
            help="Bound on samples held ahead and steps under way, such as 8G; a quarter of the machine's by default.",
        ),
    ] = None,
    max_lead: Annotated[
        int,
        typer.Option(
            "--max-lead",
            envvar="STEPFS_MAX_LEAD",
            metavar="STEPS",
            min=0,
            help="Wait when so many steps beyond the slowest group's need are committed; 0: never.",
        ),
    ] = 1000,
    limit_steps: Annotated[
        int | None,
        typer.Option(
            "--limit-steps",
            envvar="STEPFS_LIMIT_STEPS",
            metavar="N",
            min=1,
            help="Stop when this producer id has N steps, earlier runs included.",
        ),
    ] = None,
    steps_per_second: Annotated[
        float | None,
        typer.Option(
            "--steps-per-second", envvar="STEPFS_STEPS_PER_SECOND", metavar="R", help="Not faster than this."
        ),
    ] = None,
    holdout: Annotated[
        bool,
        typer.Option(
            "--holdout",
            envvar="STEPFS_HOLDOUT",
            help="Produce the records that the plan holds out, into a lake of their own.",
        ),
    ] = False,
    seal: Annotated[
        bool,
        typer.Option(
            "--seal",
            envvar="STEPFS_SEAL",
            help="Seal the lake when the plan is complete: no more steps come.",
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            envvar="STEPFS_METRICS_PORT",
            metavar="PORT",
            min=1,
            max=65535,
            help="Serve Prometheus metrics (/metrics, and /healthz).",
        ),
    ] = None,
    metrics_address: Annotated[
        str,
        typer.Option(
            "--metrics-address",
            envvar="STEPFS_METRICS_ADDRESS",
            metavar="ADDRESS",
            help="Address of the metrics port.",
        ),
    ] = "127.0.0.1",
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Run PLAN into LAKE, created when absent; run again after any ending, it continues exactly."""
    from stepfs.errors import UsageError  # noqa: PLC0415
    from stepfs.format.arguments import parse_size  # noqa: PLC0415
    from stepfs_producer.plan.packages import plan_packages  # noqa: PLC0415

    with plan_packages():
        from stepfs_producer.cli.plans.run_report import run_and_report  # noqa: PLC0415
        from stepfs_producer.run.options import RunOptions  # noqa: PLC0415
        from stepfs_producer.run.prepare import plan_at  # noqa: PLC0415

    if steps_per_second is not None and not steps_per_second > 0:
        raise UsageError(f"--steps-per-second {steps_per_second}: use a number above 0")
    options = RunOptions(
        lake,
        producer_id=producer_id,
        accept_changes=accept_changes,
        workers=workers,
        memory_bytes=None if memory is None else parse_size(memory),
        max_lead=max_lead or None,
        limit_steps=limit_steps,
        steps_per_second=steps_per_second,
        seal=seal,
        store_options=StoreOptions(endpoint_url),
        metrics_port=metrics_port,
        metrics_address=metrics_address,
    )
    if code := run_and_report(plan_at(plan, held_out=holdout), options, as_json=as_json):
        raise typer.Exit(code)
