"""A block's task → its records in block order: the same for every process, at any time.

A record that is not of this run, or excluded, keeps its place and has no bytes. Holdout and shard are decided by hashes
of its bytes: duplicates are on one side, and the records of a file do not move when another file comes or goes. A
fractional last epoch keeps a record by the hash of its place. A record outside of the epoch is not decoded, so it is not
bad; a bad one is so on both sides of holdout, and in every shard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import takewhile
from typing import Final

import numpy as np
from crc32c import crc32c

from stepfs.errors import CorruptError
from stepfs_producer.plan.arrays import Mask
from stepfs_producer.plan.order import KEY_BYTES, BlockAddress, record_key, record_order
from stepfs_producer.plan.ragged import Ragged, joined_masks
from stepfs_producer.plan.values import Document
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.holdout import document_of, is_of_this_run
from stepfs_producer.sources.record import (
    ID_BYTES,
    RECORD_BYTES_MAX,
    Bad,
    Block,
    BlockTask,
    Fragment,
    Kind,
    Line,
    Raw,
    Records,
    SourceSpec,
    Tagged,
    Tokens,
    Value,
    weight_of,
)

OPEN_MAX: Final = 64

_open: OrderedDict[tuple[SourceSpec, Fragment], _Cutter] = OrderedDict()


def read_block(spec: SourceSpec, task: BlockTask) -> Block:
    """Read and decode one block.

    `RefusedError` names a file that is gone or changed, `CorruptError` a damaged one; `OSError` and
    `StoreUnreachableError` may pass, and the same task may be given again. A record that cannot be decoded is in `bad`.
    """
    stored, more = _of_block(spec, task)
    place = task.place
    follows = BlockAddress(place.epoch, place.fragment, place.block + 1) if more else task.next_fragment
    ended = task.epochs_end is not None and follows.epoch >= task.epochs_end
    return Block(place, _ordered(spec, task, stored), follows, ended, _crc32c(stored, task.cut))


def block_crc32c(spec: SourceSpec, task: BlockTask) -> int:
    """That of the block, which is not decoded; errors as of `read_block`."""
    return _crc32c(_of_block(spec, task)[0], task.cut)


def _of_block(spec: SourceSpec, task: BlockTask) -> tuple[list[Raw], bool]:
    """The records as stored, and whether another block of the fragment follows."""
    if task.cut:
        return _cut(spec, task.fragments[0], task.place.block)
    return [raw for fragment in task.fragments for raw in _stored(spec, fragment)], False


def _crc32c(stored: Sequence[Raw], cut: bool) -> int:
    places = [number for raw in stored for number in (raw.file, raw.offset, raw.weight if cut else 0)]
    crc = crc32c(np.array(places, "<i8").tobytes())
    for raw in stored:
        if isinstance(raw.stored, Line) and raw.stored.data is not None:
            crc = crc32c(raw.stored.data, crc)
    return crc


def read_record(spec: SourceSpec, fragment: Fragment, offset: int) -> Records | None:
    """The record at `offset` of a fragment's file, by itself, of any run; None if none begins there."""
    every = replace(spec, source=spec.source.changed(holdout=Fraction(0), shard=None), exclude=())
    stored = format_of(spec).records(spec, fragment)
    found = [raw for raw in takewhile(lambda raw: raw.offset <= offset, stored) if raw.offset == offset]
    here = BlockAddress(0, 0, 0)
    task = BlockTask(here, (fragment,), bytes(KEY_BYTES), cut=False, next_fragment=here, epochs_end=None, share=None)
    return _ordered(every, task, found) if found else None


def _stored(spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
    """The records of a fragment. Where it is damaged, and the source goes on, its rest is one bad record."""
    if not fragment.ref.size:  # of a file that is gone, or became shorter, and was accepted so
        return
    offset = fragment.first_record
    try:
        for raw in format_of(spec).records(spec, fragment):
            yield raw
            offset = raw.offset + 1
    except CorruptError as error:
        if spec.source.on_error.file is None:
            raise
        yield Raw(fragment.file, offset, 1, Bad(f"the rest of {error}"))


def _ordered(spec: SourceSpec, task: BlockTask, stored: Sequence[Raw]) -> Records:
    """Decode records, in the order of the block."""
    rule = format_of(spec)
    kind = rule.kind(spec)
    count = len(stored)
    dropped = np.zeros(count, bool)
    bad: dict[int, str] = {}
    excluded: dict[int, Document] = {}
    exclude, names = spec.exclude, {fragment.file: fragment.ref.name for fragment in task.fragments}
    data: list[bytes] = []
    masks: list[Mask | None] = []
    tags: list[bytes] = []
    order = record_order(task.key, count, shuffle=spec.source.shuffle is not None)
    for at, index in enumerate(order.tolist()):
        raw = stored[index]
        value: Value = b""
        if task.share is not None and not is_in_epoch(spec, task, raw):
            dropped[at] = True
        else:
            value = raw.stored if isinstance(raw.stored, Bad) else rule.decode(spec, raw.stored)
        value, tag = value if isinstance(value, Tagged) else (value, b"")
        if (size := weight_of(value)) > RECORD_BYTES_MAX:
            value = Bad(f"a record of {size} bytes; at most {RECORD_BYTES_MAX} are read")
        if isinstance(value, Bad):
            bad[at] = value.reason
            value = b""
        elif not dropped[at]:
            if exclude and (document := document_of(spec, names[raw.file], raw.offset, value)) is not None:
                excluded[at] = document
            if at in excluded or not is_of_this_run(spec, value):
                dropped[at], value = True, b""
        ids, mask = value if isinstance(value, Tokens) else (value, None)
        data.append(ids)
        tags.append(tag)
        masks.append(None if mask is None else np.frombuffer(mask, np.uint8))
    files = np.array([raw.file for raw in stored], np.int64)
    offsets = np.array([raw.offset for raw in stored], np.int64)
    return Records(
        kind,
        Ragged.of_bytes(data),
        files[order],
        offsets[order],
        dropped,
        bad,
        joined_masks(masks, [len(one) // ID_BYTES for one in data]) if kind is Kind.TOKENS else None,
        excluded,
        None if spec.source.tag is None else Ragged.of_bytes(tags),
    )


class _Cutter:
    """The blocks of one fragment, one after the other."""

    def __init__(self, records: Iterator[Raw], block_bytes: int) -> None:
        self._records = records
        self._block_bytes = block_bytes
        self._ahead = next(records, None)
        self.block = 0  # the next one

    def next(self) -> tuple[list[Raw], bool]:
        """The records of the next block, and whether another one follows."""
        taken: list[Raw] = []
        total = 0
        while self._ahead is not None and total < self._block_bytes:
            taken.append(self._ahead)
            total += max(1, self._ahead.weight)
            self._ahead = next(self._records, None)
        self.block += 1
        return taken, self._ahead is not None


def _cut(spec: SourceSpec, fragment: Fragment, block: int) -> tuple[list[Raw], bool]:
    """Block `block` of a fragment, from where an earlier task of this process stopped, if that is not behind it."""
    key = (spec, fragment)
    cutter = _open.pop(key, None)
    if cutter is None or cutter.block > block:
        cutter = _Cutter(_stored(spec, fragment), spec.block_bytes)
    while cutter.block < block:
        _, more = cutter.next()
        if not more:
            return [], False
    taken, more = cutter.next()
    if more:
        _open[key] = cutter
        if len(_open) > OPEN_MAX:
            _open.popitem(last=False)
    return taken, more


def is_in_epoch(spec: SourceSpec, task: BlockTask, raw: Raw) -> bool:
    """Whether a fractional last epoch keeps the record: its own key is below the fraction."""
    share = task.share or Fraction(1)
    key = int.from_bytes(record_key(spec.seed, task.place.epoch, spec.name, raw.file, raw.offset), "little")
    return key * share.denominator < share.numerator << (8 * KEY_BYTES)
