"""What a loader does: read a block of a source."""

from __future__ import annotations

from stepfs_producer.sources.block import Block
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.sources.task import BlockTask


def read(spec: SourceSpec, task: BlockTask) -> Block:
    """The records of one block, in block order. Errors: see `sources.reading.read_block`."""
    return read_block(spec, task)
