"""What a loader does: read a block of a source, and make samples of a group of its records."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stepfs_producer.plan.order import record_key
from stepfs_producer.roles.tokenising import tokenised
from stepfs_producer.sources.block import Block, Records
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.sources.task import BlockTask
from stepfs_producer.transforms.spec import TransformSpec
from stepfs_producer.transforms.tokenised import Tokenised


def read(spec: SourceSpec, task: BlockTask) -> Block:
    """The records of one block, in block order. Errors: see `sources.reading.read_block`."""
    return read_block(spec, task)


def transform(spec: TransformSpec, records: Records, keys: Sequence[bytes]) -> Tokenised:
    """Samples of consecutive records; `keys` are the records' own, one each.

    A record that cannot become a sample because of what it holds is bad, with the reason. `UsageError`, `AbsentError`,
    `RefusedError` if the tokenizer or the function cannot be used; `StepfsError` if the function met an error that
    is not the record's.
    """
    return tokenised(spec, records, keys)


def timed_transform(
    spec: TransformSpec, seed: int, epoch: int, name: str, records: Records
) -> tuple[Tokenised, float]:
    """`transform`, and its seconds. A record's key is made only for a function that may use it."""
    started = time.perf_counter()
    keys = [b""] * len(records)
    if spec.call is not None:
        keys = [
            record_key(seed, epoch, name, file, offset)
            for file, offset in zip(records.files.tolist(), records.offsets.tolist(), strict=True)
        ]
    return transform(spec, records, keys), time.perf_counter() - started
