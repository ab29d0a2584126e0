"""`stepfs-produce find`: the steps that hold a record."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, Lake, PlanDirectory, opt
from stepfs.store.api import StoreOptions


def find(
    lake: Lake,
    source: Annotated[str, opt("--source", "Name of the source in the plan.", "NAME")],
    file: Annotated[str, opt("--file", "The file, as `stepfs-produce lineage` prints it.", "FILE")],
    record: Annotated[
        int,
        opt(
            "--record",
            "Where the record begins: byte of the file, row of Parquet, number of a document.",
            "N",
            least=0,
        ),
    ],
    plan_dir: PlanDirectory = ".",
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Find the steps of LAKE that hold a record, in every epoch. The other way round: `stepfs-produce lineage`."""
    from stepfs_producer.cli.plans.find_report import find_report

    report = find_report(lake, StoreOptions(endpoint_url), source, file, record, plan_dir=plan_dir, as_json=as_json)
    typer.echo(report)
