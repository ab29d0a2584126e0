"""The tasks of workers: read blocks, transform groups of records, make steps.

Heads return to the command, for the planner. Bodies stay with the engine until a task needs them.
Workers import this module, so nothing here may need trio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans, cut_to, gathered
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import BlockAddress, BlockTask, Records, SourceSpec
from stepfs_producer.transforms.documents import TransformSpec
from stepfs_producer.transforms.records import timed_transform


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block without its records."""

    place: BlockAddress
    records: int
    follows: BlockAddress
    ended: bool
    crc32c: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupHead:
    """A group of samples without them. Equal ones are of equal results, however long those took."""

    lengths: Integers  # per record: tokens; 0: no sample, BAD: undecodable
    bad: Mapping[int, tuple[int, int, str]]  # record → file, offset, why
    columns: Integers | None = None  # [records, columns]: rows that each has beside its tokens
    seconds: float = 0.0  # of the transform
    learned: int = 0  # tokens that the loss looks at
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # record → tokens of its documents
    plain: tuple[int, ...] = ()  # records that `fim` left as they are

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupHead) and self._result() == other._result()

    def _result(self) -> tuple[object, ...]:
        columns = None if self.columns is None else self.columns.tolist()
        return self.lengths.tolist(), self.bad, columns, self.parts, self.plain

    __hash__ = None  # type: ignore[assignment]


def read(spec: SourceSpec, task: BlockTask) -> tuple[BlockHead, Records]:
    """See `read_block`."""
    block = read_block(spec, task)
    return BlockHead(block.place, len(block.records), block.follows, block.ended, block.crc32c), block.records


def transform(
    spec: TransformSpec, seed: int, epoch: int, name: str, block: Records, first: int, last: int
) -> tuple[GroupHead, SampleGroup]:
    """Records `first` … `last` - 1 of a block; see `timed_transform`."""
    records = block.part(first, last)
    made, seconds = timed_transform(spec, seed, epoch, name, records)
    bad = {index: (int(records.files[index]), int(records.offsets[index]), why) for index, why in made.bad.items()}
    begins = np.concatenate([[0], np.cumsum(np.maximum(made.lengths, 0))])
    edges = [begins[record] + edge for record, parts in made.parts.items() for edge in accumulate(parts)]
    cuts = np.array(edges, np.int64) if edges else None
    sides = None if spec.source.pair is None else np.ones(len(records), np.int64)
    if sides is not None:
        sides[list(made.rejected)] = 2
    group = SampleGroup(begins, made.ids, made.mask, records.files, records.offsets, made.columns, cuts, sides)
    columns = None if made.columns is None else made.columns.counts
    learned = len(made.ids) if made.mask is None else int(made.mask.sum())
    return GroupHead(made.lengths, bad, columns, seconds, learned, made.parts, made.plain), group


def record_place(block: Records, index: int) -> tuple[int, int]:
    return int(block.files[index]), int(block.offsets[index])


def make_step(
    spec: PayloadSpec, step: StepSpans, ranks: Sequence[int] | None, *groups: SampleGroup
) -> tuple[list[bytes], list[int]]:
    """The payloads of a step, or of some of its ranks; see `construct`."""
    task = gathered(step, groups, pairs=spec.pairs, align=spec.align)
    return construct(spec, task if ranks is None else cut_to(task, ranks))


@dataclass(frozen=True, slots=True)
class MadeStep:
    """A step that returns to the command, with its checksums."""

    payloads: list[bytes]
    records: list[int]
    crc32c: list[int]

    @property
    def payload_bytes(self) -> int:
        return sum(map(len, self.payloads))


def return_step(
    spec: PayloadSpec, step: StepSpans, ranks: Sequence[int] | None, _ticket: object, *groups: SampleGroup
) -> MadeStep:
    """Make a step, or the files of some of its ranks, and upload nothing."""
    from stepfs.format.tgb import checksum_slice  # noqa: PLC0415

    payloads, records = make_step(spec, step, ranks, *groups)
    return MadeStep(payloads, records, [checksum_slice(memoryview(payload))[0] for payload in payloads])
