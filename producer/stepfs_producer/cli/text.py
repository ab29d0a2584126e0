"""`stepfs-produce text`: files of text → packed token batches → steps of a lake. A plan of one source, built and run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stepfs.cli.options import EndpointUrl, Lake
from stepfs.declared_option import Opt
from stepfs.store.api import StoreOptions
from stepfs_producer.cli.plans.text_options import TextOptions
from stepfs_producer.run.options import RunOptions


def text(
    lake: Lake,
    *,
    inputs: Annotated[
        list[str],
        Opt(
            "--input",
            "File, directory, glob or s3:// URL of text or of .jsonl (.gz, .zst too); repeatable. Separated by spaces in "
            "the variable.",
            "PATH",
            short="-i",
        ),
    ],
    endpoint_url: EndpointUrl = None,
    values: Annotated[dict[str, Any], TextOptions],
) -> None:
    """Pack text into steps of LAKE, created when absent; run again after any ending, it continues exactly.

    Documents stand end to end in the order of the files, and every one is in exactly one step; the last step is padded. Files
    must not change meanwhile. For everything else, such as several sources or shuffling, write a plan: `stepfs-produce run`.
    """
    from stepfs_producer.cli.plans.run_report import run_and_report
    from stepfs_producer.cli.plans.text_plan import parsed_shard, shape_of_lake, text_plan
    from stepfs_producer.run.prepare import LocatedPlan

    options = TextOptions(**values)
    index, count = parsed_shard(options.shard)
    store_options = StoreOptions(endpoint_url)
    shape = shape_of_lake(lake, options.slices, options.ext, store_options)
    plan = text_plan(inputs, shape, options, endpoint_url)
    run_options = RunOptions(
        lake,
        producer_id=options.producer_id or f"text-{index}-of-{count}",
        max_lead=None,
        limit_steps=options.limit_steps,
        seal=options.seal,
        fixed_shape=True,
        store_options=store_options,
    )
    if code := run_and_report(LocatedPlan(plan), run_options):
        raise typer.Exit(code)
