"""The options of `stepfs-produce text`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stepfs.declared_option import Opt
from stepfs_producer.run.options import LimitSteps


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The plan that a run of text gets, and where that run ends."""

    slices: Annotated[int | None, Opt("--slices", "Slices per step; needed to create the lake.", "N", least=1)] = None
    seq_len: Annotated[int, Opt("--seq-len", "Tokens per row.", "L", least=2)] = 1024
    batch_size: Annotated[int, Opt("--batch-size", "Rows per slice.", "B", least=1)] = 8
    tokenizer_file: Annotated[
        str | None,
        Opt("--tokenizer-file", "The model's tokenizer.json; without it, tokens are bytes.", "PATH"),
    ] = None
    ext: Annotated[
        str | None,
        Opt("--ext", "Kind of file: .safetensors .npy .pt .tar .bin; .safetensors for a new lake.", ".EXT"),
    ] = None
    limit_steps: LimitSteps = None
    seal: Annotated[bool, Opt("--seal", "Seal the lake at the end of the text: no more steps come.")] = False
    shard: Annotated[str, Opt("--shard", "Produce part I of N of the text, one process each.", "I/N")] = "0/1"
    producer_id: Annotated[
        str | None,
        Opt(
            "--producer-id",
            "Name that a restart continues under; from the shard by default. One live process per id.",
            "ID",
        ),
    ] = None
