"""One source as a plan declares it: how to find, read and order its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

BLOCK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Everything here except `epochs`, `endpoint_url` and `profile` is part of the source's identity."""

    name: str
    format: str  # jsonl, text, parquet, megatron; or `module:Class` of the user
    files: tuple[str, ...]  # files, directories, globs; s3:// URLs of them
    seed: int = 0
    records: str = "lines"  # of text: lines, or files
    text_field: str = "text"  # of JSONL and Parquet
    tokens_field: str | None = None  # a column of token ids in place of text
    mask_field: str | None = None  # beside `tokens_field`: 0 or False where the loss ignores the token
    labels_field: str | None = None  # beside `tokens_field`: -100 where the loss ignores the token
    whole_records: bool = False  # a transform gets the whole JSON object or row, not its text
    shuffle: bool = True
    block_bytes: int = BLOCK_BYTES
    epochs: Fraction | None = None  # None: without end
    holdout: Fraction = Fraction(0)  # share of records that only a run with `held_out` produces
    held_out: bool = False
    shard: tuple[int, int] = (0, 1)  # index, count: a hash of its bytes deals a record to one of them
    endpoint_url: str | None = None
    profile: str | None = None
    version: str = ""  # of the user's code, as declared
    options: Mapping[str, str] = field(default_factory=dict)  # for a format of the user's
