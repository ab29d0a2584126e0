"""What a loader does: read a block of a source, and make samples of a group of its records."""

from __future__ import annotations

from collections.abc import Sequence

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
