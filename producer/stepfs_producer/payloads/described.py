"""What `encode` writes, as a lake's payload schema: recorded when a run creates the lake.

A plan's numbers of micro-batches and tokens may change at a step, so those dimensions have names. The rows of
`stepfs-produce text` never change, so they are numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from stepfs.errors import RefusedError
from stepfs.format.payload.check import schemas_at_odds
from stepfs.format.payload.schema import ONLY_ARRAY, ArraySpec, Dimension, PayloadSchema, Scalar, format_of
from stepfs_producer.payloads.columns import COUNTS, ColumnSpec
from stepfs_producer.payloads.rank_arrays import SPANS

_STACKED: Final = 4  # arrays in an .npy file
_SHORT_VOCABULARY: Final = 1 << 16


class _Ids(Protocol):
    """A tokenizer's name and size."""

    @property
    def identity(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...


def planned_schema(
    ext: str,
    tokenizer: Mapping[str, Scalar],
    *,
    vocabulary: int,
    shape: tuple[Dimension, Dimension] = ("micro", "tokens"),
    columns: Sequence[ColumnSpec] = (),
) -> PayloadSchema:
    """Of the files of a plan. `shape`: micro-batches in a file, and tokens of each; numbers where they never change."""
    if ext == ".bin":  # its length tells one dimension
        known = all(isinstance(size, int) for size in shape)
        dtype = "uint16" if vocabulary <= _SHORT_VOCABULARY else "uint32"
        return PayloadSchema(
            "bin", {"input_ids": ArraySpec(dtype, shape if known else ("tokens",))}, tokenizer
        )
    arrays = _of_rows(ext, shape, len(SPANS), {"cu_seqlens": "boundaries", "cu_seqlens_offsets": None})
    if arrays is not None:
        for column in columns:
            rows: tuple[Dimension, ...] = (column.name, *column.shape)
            arrays[column.name] = ArraySpec(column.dtype, rows, column.name if column.own_file else "")
            arrays[column.name + COUNTS] = ArraySpec("int32", ("spans",))
    return PayloadSchema(format_of(ext), arrays, tokenizer)


def tokenizer_facts(
    tokenizer: _Ids, file_digest: str | None, *, eos: int | None, pad: int, bos: int | None = None
) -> dict[str, Scalar]:
    """A tokenizer as schemas name it. `file_digest`: SHA-256 of the file that it was loaded from, in hex."""
    kind = tokenizer.identity.partition("-")[0]
    facts: dict[str, Scalar] = {
        "kind": kind,
        "identity": tokenizer.identity,
        "vocabulary": tokenizer.vocabulary,
    }
    facts |= {
        name: number for name, number in (("bos", bos), ("eos", eos), ("pad", pad)) if number is not None
    }
    if file_digest is not None:
        facts["file_sha256"] = file_digest
    return facts


def refuse_other_arrays(lake: str, made: PayloadSchema, recorded: PayloadSchema | None) -> str | None:
    """`RefusedError` if the lake promises other arrays than are about to be made. The warning for another tokenizer."""
    if recorded is None:
        return None
    problem = schemas_at_odds(made, recorded) if recorded.binding else None
    if problem is not None:
        raise RefusedError(
            f"{lake}: {problem}; name another lake, or fork this one with another --payload-schema"
        )
    mine, others = made.tokenizer.get("identity"), recorded.tokenizer.get("identity")
    if None in {mine, others} or mine == others:
        return None
    return f"the lake's ids are said to be made with the tokenizer {others}, and these are made with {mine}"


def _of_rows(
    ext: str, shape: tuple[Dimension, Dimension], span_columns: int, more: Mapping[str, Dimension]
) -> dict[str, ArraySpec] | None:
    if ext == ".npy":
        return {ONLY_ARRAY: ArraySpec("int32", (_STACKED, *shape))}
    if ext not in {".pt", ".safetensors"}:
        return None
    return {
        **dict.fromkeys(("input_ids", "labels"), ArraySpec("int64", shape)),
        **dict.fromkeys(("position_ids", "doc_ids"), ArraySpec("int32", shape)),
        **{name: ArraySpec("int32", (size,)) for name, size in more.items()},
        "spans": ArraySpec("int64", ("spans", span_columns)),
    }
