"""`stepfs-produce text`: files of text → packed token batches → steps of a lake. A plan of one source, built and run."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Lake
from stepfs.store.options import StoreOptions


def text(
    lake: Lake,
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            envvar="STEPFS_INPUT",
            metavar="PATH",
            help="File, directory, glob or s3:// URL of text or of .jsonl (.gz, .zst too); repeatable. Separated by spaces in "
            "the variable.",
        ),
    ],
    slices: Annotated[
        int | None,
        typer.Option(
            "--slices",
            envvar="STEPFS_SLICES",
            metavar="N",
            min=1,
            help="Slices per step; needed to create the lake.",
        ),
    ] = None,
    seq_len: Annotated[
        int, typer.Option("--seq-len", envvar="STEPFS_SEQ_LEN", metavar="L", min=2, help="Tokens per row.")
    ] = 1024,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", envvar="STEPFS_BATCH_SIZE", metavar="B", min=1, help="Rows per slice."),
    ] = 8,
    tokenizer_file: Annotated[
        str | None,
        typer.Option(
            "--tokenizer-file",
            envvar="STEPFS_TOKENIZER_FILE",
            metavar="PATH",
            help="The model's tokenizer.json; without it, tokens are bytes.",
        ),
    ] = None,
    ext: Annotated[
        str | None,
        typer.Option(
            "--ext",
            envvar="STEPFS_EXT",
            metavar=".EXT",
            help="Kind of file: .safetensors .npy .pt .tar .bin; .safetensors for a new lake.",
        ),
    ] = None,
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
    seal: Annotated[
        bool,
        typer.Option(
            "--seal", envvar="STEPFS_SEAL", help="Seal the lake at the end of the text: no more steps come."
        ),
    ] = False,
    shard: Annotated[
        str,
        typer.Option(
            "--shard",
            envvar="STEPFS_SHARD",
            metavar="I/N",
            help="Produce part I of N of the text, one process each.",
        ),
    ] = "0/1",
    producer_id: Annotated[
        str | None,
        typer.Option(
            "--producer-id",
            envvar="STEPFS_PRODUCER_ID",
            metavar="ID",
            help="Name that a restart continues under; from the shard by default. One live process per id.",
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Pack text into steps of LAKE, created when absent; run again after any ending, it continues exactly.

    Documents stand end to end in the order of the files, and every one is in exactly one step; the last step is padded. Files
    must not change meanwhile. For everything else, such as several sources or shuffling, write a plan: `stepfs-produce run`.
    """
    from stepfs_producer.plan.packages import plan_packages  # noqa: PLC0415

    with plan_packages():
        from stepfs_producer.cli.plans.run_report import run_and_report  # noqa: PLC0415
        from stepfs_producer.cli.plans.text_plan import parsed_shard, shape_of_lake, text_plan  # noqa: PLC0415
        from stepfs_producer.run.options import RunOptions  # noqa: PLC0415
        from stepfs_producer.run.prepare import LocatedPlan  # noqa: PLC0415

    index, count = parsed_shard(shard)
    store_options = StoreOptions(endpoint_url)
    plan = text_plan(
        inputs,
        shape_of_lake(lake, slices, ext, store_options),
        rows=batch_size,
        seq_len=seq_len,
        tokenizer_file=tokenizer_file,
        shard=shard,
        endpoint_url=endpoint_url,
    )
    options = RunOptions(
        lake,
        producer_id=producer_id or f"text-{index}-of-{count}",
        max_lead=None,
        limit_steps=limit_steps,
        seal=seal,
        fixed_shape=True,
        store_options=store_options,
    )
    if code := run_and_report(LocatedPlan(plan), options):
        raise typer.Exit(code)
