"""The plan that `stepfs-produce text` runs: one source, end to end as stored, every row full but the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stepfs._internal import interruption
from stepfs.cli.target import opened_store
from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs.format.identity import LakeIdentity
from stepfs.lake.identity import open_lake
from stepfs.store.api import StoreOptions
from stepfs_producer.plan.holds import IDS_ALONE
from stepfs_producer.plan.model import Plan, parsed_plan, with_ids_alone
from stepfs_producer.plan.values import parse_shard
from stepfs_producer.run.options import TextOptions
from stepfs_producer.sources.compressed import COMPRESSED
from stepfs_producer.sources.find import find_files

_EXT: Final = ".safetensors"  # of a new lake
_JSON_LINES: Final = (".jsonl", ".ndjson")
_SOME: Final = 1 << 31


class LakeShape(NamedTuple):
    """Slices of a step, and the extension of their files."""

    slices: int
    ext: str


def shape_of_lake(lake: str, slices: int | None, ext: str | None, store_options: StoreOptions) -> LakeShape:
    """The slices and the extension named, else those of the lake. `UsageError` if there is neither, `RefusedError` if
    the lake has others.
    """
    identity = interruption.run(_identity, lake, store_options)
    if identity is None:
        if slices is None:
            raise UsageError(f"{lake} is not a lake yet; give --slices N to create it")
        return LakeShape(slices, ext or _EXT)
    if slices not in {None, identity.slices}:
        has = f"{lake} has {identity.slices} slices per step, not {slices}"
        raise RefusedError(f"{has}; name another lake, or give --slices {identity.slices}")
    if ext not in {None, identity.ext}:
        raise RefusedError(f"{lake} holds {identity.ext} files, not {ext}; name another lake, or leave --ext out")
    return LakeShape(identity.slices, identity.ext)


async def _identity(lake: str, store_options: StoreOptions) -> LakeIdentity | None:
    async with opened_store(lake, store_options) as store:
        try:
            return await open_lake(store)
        except AbsentError:
            return None


def parsed_shard(text: str) -> tuple[int, int]:
    """`I/N` → index and count."""
    try:
        return parse_shard(text)
    except ValueError as error:
        raise UsageError(f"--shard: {error}") from error


def text_plan(inputs: Sequence[str], shape: LakeShape, options: TextOptions, endpoint_url: str | None) -> Plan:
    """A row is a micro-batch, so a file holds `batch_size` rows. `UsageError` for a value that a plan cannot have."""
    tokenizer = options.tokenizer_file
    if options.eos and not tokenizer:
        raise UsageError("--eos names a token of --tokenizer-file; give that, too")
    source = _format_of(inputs, endpoint_url)
    of_ids = shape.ext == IDS_ALONE
    plan = parsed_plan(
        {
            "output": {
                "ext": _EXT if of_ids else shape.ext,
                "mesh": f"dp={shape.slices}",
                "sequence_length": options.seq_len,
                "micro_batches": options.batch_size,
            },
            "tokenizer": {"kind": "huggingface", "file": tokenizer, "eos": options.eos} if tokenizer else "bytes",
            "sources": {
                "text": {
                    **source,
                    "files": list(inputs),
                    "shuffle": "none",
                    "epochs": 1,
                    "shard": options.shard,
                    "endpoint_url": endpoint_url,
                }
            },
            "pack": "concat",
            "balance": "none",
            "until": {"last": "pad"},
        }
    )
    return with_ids_alone(plan) if of_ids else plan


def _format_of(inputs: Sequence[str], endpoint_url: str | None) -> dict[str, Any]:
    """JSON lines if all files are, text if none is. Files that hold no text are skipped: a directory may have anything."""
    names = [file.name for file in find_files(inputs, (), endpoint_url=endpoint_url)]
    for suffix in COMPRESSED:
        names = [name.removesuffix(suffix) for name in names]
    json_lines = [name.endswith(_JSON_LINES) for name in names]
    if all(json_lines):
        return {"format": "jsonl"}
    if any(json_lines):
        raise UsageError("the inputs are .jsonl files and others; name one kind, or write a plan with a source of each")
    skip = {"do": "skip", "at_most": "100%", "in_a_row": _SOME}
    return {"format": "text", "on_error": skip}
