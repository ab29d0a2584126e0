"""The tasks of workers: read blocks, transform groups of records, make steps.

Heads return to the command, for the planner. Bodies stay with the engine until a task needs them.
Workers import this module, so nothing here may need trio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans, cut_to, gathered
from stepfs_producer.plan.samples import BlockHead, Heads
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import BlockTask, Records, SourceSpec
from stepfs_producer.transforms.documents import TransformSpec
from stepfs_producer.transforms.records import timed_transform


@dataclass(frozen=True, slots=True, eq=False)
class GroupHead:
    """A group of samples without them. Equal ones are of equal results, however long those took."""

    heads: Heads
    bad: Mapping[int, tuple[int, int, str]]  # record → file, offset, why
    seconds: float = 0.0  # of the transform
    learned: int = 0  # tokens that the loss looks at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupHead) and self._result() == other._result()

    def _result(self) -> tuple[object, ...]:
        heads = self.heads
        documents = None if heads.documents is None else [one.tolist() for one in heads.documents]
        more = [None if one is None else one.tolist() for one in (heads.tokens, heads.rows, heads.plain)]
        return more, documents, self.bad

    __hash__ = None  # type: ignore[assignment]


def read(spec: SourceSpec, task: BlockTask) -> tuple[BlockHead, Records]:
    """See `read_block`."""
    block = read_block(spec, task)
    return block.head, block.records


def transform(
    spec: TransformSpec, seed: int, epoch: int, name: str, block: Records, first: int, last: int
) -> tuple[GroupHead, SampleGroup]:
    """Records `first` … `last` - 1 of a block; see `timed_transform`."""
    records = block.part(first, last)
    made, seconds = timed_transform(spec, seed, epoch, name, records)
    bad = {index: (*record_place(records, index), why) for index, why in made.bad.items()}
    return GroupHead(made.heads, bad, seconds, made.learned), made.samples


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
