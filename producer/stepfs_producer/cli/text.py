"""`stepfs-produce text`: files of text → packed token batches → steps of a lake."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.errors import UsageError
from stepfs.store.options import StoreOptions
from stepfs_producer.transforms.spec import TokenizerKind


def text(
    lake: Lake,
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--input",
            "-i",
            envvar="STEPFS_INPUT",
            metavar="PATH",
            help="File or directory of text (.jsonl and .gz too); repeatable. Separated by ':' in the variable.",
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
    ext: Annotated[
        str | None,
        typer.Option(
            "--ext",
            envvar="STEPFS_EXT",
            metavar=".EXT",
            help="Kind of file: .safetensors .npy .pt .tar .bin; .safetensors for a new lake.",
        ),
    ] = None,
    producer_id: Annotated[
        str | None,
        typer.Option(
            "--producer-id",
            envvar="STEPFS_PRODUCER_ID",
            metavar="ID",
            help="Name that a restart continues under; from the shard by default. One live process per id.",
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            "--shard", envvar="STEPFS_SHARD", metavar="I/N", help="Produce part I of N of the source."
        ),
    ] = "0/1",
    tokenizer: Annotated[
        TokenizerKind,
        typer.Option(
            "--tokenizer",
            envvar="STEPFS_TOKENIZER",
            help="Bytes, a BPE trained on the inputs, or a model's own file.",
        ),
    ] = TokenizerKind.BYTES,
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size", envvar="STEPFS_VOCAB_SIZE", metavar="N", help="Ids of a BPE to be trained."
        ),
    ] = 8192,
    tokenizer_file: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer-file",
            envvar="STEPFS_TOKENIZER_FILE",
            metavar="PATH",
            help="The model's tokenizer.json; or JSON of the BPE: used if it exists, written if not; in the cache directory by default.",
        ),
    ] = None,
    eos: Annotated[
        str | None,
        typer.Option(
            "--eos",
            envvar="STEPFS_EOS",
            metavar="TOKEN",
            help="The model's token that ends a document; found by its usual names.",
        ),
    ] = None,
    pad: Annotated[
        str | None,
        typer.Option(
            "--pad", envvar="STEPFS_PAD", metavar="TOKEN", help="The model's token for padding; else its end."
        ),
    ] = None,
    text_field: Annotated[
        str,
        typer.Option(
            "--text-field", envvar="STEPFS_TEXT_FIELD", metavar="NAME", help="Field of .jsonl records."
        ),
    ] = "text",
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
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Pack text into steps of LAKE, created when absent; run again after any ending, it continues exactly.

    Every source byte of the shard is in exactly one step; the last step is padded. Sources must not change meanwhile.
    All text in a lake has one --seq-len and --batch-size, and a corpus keeps its number of shards.
    """
    from stepfs_producer.cli.run_text import TextRun, produce_text  # noqa: PLC0415
    from stepfs_producer.cli.vocabulary import Vocabulary  # noqa: PLC0415

    if steps_per_second is not None and not steps_per_second > 0:
        raise UsageError(f"--steps-per-second {steps_per_second}: give a number above 0, or leave it out")
    raise typer.Exit(
        produce_text(
            TextRun(
                lake=lake,
                inputs=tuple(inputs),
                slices=slices,
                seq_len=seq_len,
                batch_size=batch_size,
                ext=ext,
                producer_id=producer_id,
                shard=shard,
                vocabulary=Vocabulary(tokenizer, vocab_size, tokenizer_file, eos, pad),
                text_field=text_field,
                limit_steps=limit_steps,
                steps_per_second=steps_per_second,
                store_options=StoreOptions(endpoint_url),
                as_json=as_json,
            )
        )
    )
