"""The listing of a source, and the blocks that follow from it without opening a file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import AbsentError, CorruptError, RefusedError
from stepfs.format.planned import CorpusFile, Listing
from stepfs.store.listed import ADVICE
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.order import BlockAddress, block_key, fragment_order
from stepfs_producer.sources.files import FoundFile, head_of, open_file
from stepfs_producer.sources.find import find_files
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.record import (
    BlockTask,
    FileRef,
    Fragment,
    Kind,
    SourceSpec,
    Unit,
)

RULE: Final = "stepfs-fragments-1"  # of cutting files into fragments and blocks: see producer/DESIGN.md
RANGE_BYTES_MIN: Final = 1 << 20
FRAGMENTS_MAX: Final = 1 << 20
_MEGATRON_GROWTH: Final = 4  # tokens of one byte become int32


def located(listing: Listing, now: Listing, source: str, *, advice: str = ADVICE) -> Listing:
    """`listing` with the locations of `now`. `RefusedError` names the first file that is gone or changed.

    Files that `now` has in addition (`added`) are no part of it: the order of records is that of the listed files.
    """
    present = _Present(now.files, listing.files)
    return Listing(tuple(_located(file, present.now(file), source, advice) for file in listing.files))


def accepted(listing: Listing, now: Listing) -> tuple[Listing, list[str]]:
    """`listing` with the files of `now` in place of those that were replaced, and without those that are gone: and of each
    of these a line.
    """
    present = _Present(now.files, listing.files)
    found, lines = [], []
    for file in listing.files:
        try:
            found.append(_located(file, present.now(file), "", ""))
        except RefusedError:
            new = present.now(file) or CorpusFile(file.name, 0, "", "", ())
            found.append(replace(new, laid_out=file.layout))
            rest = "is gone: it gives nothing from here on" if not new.size else "is another: it is read as it is now"
            lines.append(f"{file.name} {rest}")
    return Listing(tuple(found)), lines


def common(listing: Listing, other: Listing) -> list[str]:
    """Names of the files that are in both, with the same bytes."""
    there = set(map(_content, listing.files))
    return [file.name for file in other.files if file.size and _content(file) in there]


def added(listing: Listing, now: Listing) -> list[str]:
    """Names of the files that came after the source began, and that it does not read."""
    present = _Present(now.files, listing.files)
    found = {there.name for file in listing.files if (there := present.now(file)) is not None}
    return [file.name for file in now.files if file.name not in found]


def continued_at(spec: SourceSpec, before: Listing, now: Listing, cursor: tuple[int, ...]) -> tuple[int, ...]:
    """The cursor (epoch, fragment, block, taken, into) in an accepted listing: behind a block that was begun, and of which a
    file is another.
    """
    task = begun_block(spec, before, cursor)
    files = () if task is None else {one.file for one in task.fragments}
    if task is None or all(before.files[number].frozen == now.files[number].frozen for number in files):
        return cursor
    return (*task.next_fragment, 0, 0)


def begun_block(spec: SourceSpec, listing: Listing, cursor: tuple[int, ...]) -> BlockTask | None:
    """The block of which a part was taken."""
    return Layout(spec, listing).task(BlockAddress(*cursor[:3])) if any(cursor[2:]) else None


def located_files(spec: SourceSpec, listing: Listing, numbers: Collection[int], *, advice: str) -> Listing:
    """`listing` with the locations of some of its files, and of those beside them; only these are opened. As `located`."""
    names = {listing.files[number].name for number in numbers}
    names |= {format_of(spec).beside(name) for name in names}
    paths = set(map(_path, names))
    there = (_inspected(spec, file) for file in _found(spec) if _path(file.name) in paths)
    found = _Present(there, listing.files)
    return Listing(
        tuple(
            _located(file, found.now(file), spec.name, advice) if file.name in names else file for file in listing.files
        )
    )


def list_corpus(spec: SourceSpec) -> Listing:
    """List the files of a source as they are now. Footers, indices and the beginnings of local files are read.

    `UsageError`, `AbsentError` and `RefusedError` say which entry or file is wrong; `AbsentError` if there is no record.
    """
    files = tuple(_inspected(spec, file) for file in _found(spec))
    if not any(_has_records(format_of(spec).unit(file.name), file) for file in files):
        what = "all its files are empty" if files else f"it has no file of the format {spec.source.format}"
        raise AbsentError(f"source {spec.name}: {what}; name files with records, or leave the source out")
    return Listing(files)


def _found(spec: SourceSpec) -> list[FoundFile]:
    rule = format_of(spec)
    entries = rule.entries(spec.source.files)
    return rule.choose(
        spec, find_files(entries, rule.suffixes, endpoint_url=spec.source.endpoint_url, profile=spec.source.profile)
    )


def _has_records(unit: Unit, file: CorpusFile) -> bool:
    if unit is Unit.PARTS:
        return any(records for records, _ in file.parts)
    return unit is not Unit.NONE and file.size > 0


def _inspected(spec: SourceSpec, found: FoundFile) -> CorpusFile:
    with closing(open_file(spec, found.location, found.size, etag=found.etag)) as file:
        head = "" if found.etag else head_of(file)
        try:
            parts = tuple(format_of(spec).parts(spec, file))
        except CorruptError:
            if spec.source.on_error.file is None:
                raise
            parts = ()
    return CorpusFile(found.name, found.size, found.etag, head, parts, found.location)


class _Present:
    """The files that are there now. A plan whose `files` got or lost an entry numbers the others anew: they are the same."""

    def __init__(self, files: Iterable[CorpusFile], listed: Iterable[CorpusFile]) -> None:
        self._named = {file.name: file for file in files}
        self._alike = {_content(file): file for file in self._named.values()}
        self._listed = set(map(_content, listed))

    def now(self, file: CorpusFile) -> CorpusFile | None:
        """The file itself, another one in its place, or None."""
        named, content = self._named.get(file.name), _content(file)
        if named is None or _content(named) == content:
            return named or self._alike.get(content)
        return self._alike.get(content, None if _content(named) in self._listed else named)


def _path(name: str) -> str:
    """Below the entry, without the entry's number."""
    return name.partition("/")[2]


def _content(file: CorpusFile) -> tuple[object, ...]:
    return _path(file.name), file.size, file.etag, file.head, file.parts


def _located(file: CorpusFile, now: CorpusFile | None, source: str, advice: str) -> CorpusFile:
    if file.is_gone:
        return file
    if now is None:
        raise RefusedError(f"source {source}: the file {file.name} is gone; {advice}")
    if _content(now) == _content(file):
        return replace(file, location=now.location)
    if now.size != file.size:
        changed = f"is {'shorter' if now.size < file.size else 'longer'} than when this plan began"
    elif now.etag != file.etag:
        changed = "was replaced since this plan began (its etag differs)"
    else:
        changed = "begins otherwise than when this plan began"
    raise RefusedError(f"source {source}: {now.location} {changed}; {advice}")


def range_bytes(sizes: Integers, others: int = 0, *, least: int = RANGE_BYTES_MIN, most: int = FRAGMENTS_MAX) -> int:
    """C: how long byte ranges of plain files of these sizes are, beside `others` further fragments.

    More files than `most` have more fragments: C then is the least that gives every file one.
    """
    count = least
    largest = int(sizes.max()) if len(sizes) else 0
    while count < largest and int((-(-sizes // count)).sum()) + others > most:
        count *= 2
    return count


class Layout:
    """The blocks of one source with one listing."""

    def __init__(
        self,
        spec: SourceSpec,
        listing: Listing,
        *,
        range_bytes_min: int = RANGE_BYTES_MIN,
    ) -> None:
        self._spec = spec
        self.listing = listing
        rule = format_of(spec)
        units = [rule.unit(file.name) for file in listing.files]
        sizes = np.array([file.layout[0] for file in listing.files], np.int64)
        ranged = np.array([unit is Unit.RANGES for unit in units], bool)
        parts = sum(len(file.layout[1]) for file, unit in zip(listing.files, units, strict=True) if unit is Unit.PARTS)
        others = parts + sum(unit is Unit.WHOLE for unit in units)
        self.range_bytes = range_bytes(sizes[ranged], others, least=range_bytes_min)
        counts = [
            {
                Unit.RANGES: -(-file.layout[0] // self.range_bytes),
                Unit.PARTS: len(file.layout[1]),
                Unit.WHOLE: int(file.layout[0] > 0),
                Unit.NONE: 0,
            }[unit]
            for file, unit in zip(listing.files, units, strict=True)
        ]
        self._firsts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64)
        self._units = units
        self._bytes, self._alone = self._sizes(units)
        self._names = {file.name: number for number, file in enumerate(listing.files)}
        self._order = lru_cache(maxsize=2)(self._order_of)

    def _sizes(self, units: list[Unit]) -> tuple[Integers, NDArray[np.bool_]]:
        """Per fragment: its listed bytes, and whether it is cut into blocks."""
        sizes = np.zeros(self.fragments_count, np.int64)
        whole = np.zeros(self.fragments_count, bool)
        for number, (file, unit) in enumerate(zip(self.listing.files, units, strict=True)):
            first, end = int(self._firsts[number]), int(self._firsts[number + 1])
            size, parts = file.layout
            if unit is Unit.PARTS:
                sizes[first:end] = [count for _, count in parts]
            elif unit is Unit.RANGES and end > first:
                sizes[first:end] = self.range_bytes
                sizes[end - 1] = size - (end - first - 1) * self.range_bytes
            else:
                sizes[first:end] = size
                whole[first:end] = True
        return sizes, whole | (sizes > self._spec.block_bytes)

    @property
    def fragments_count(self) -> int:
        return int(self._firsts[-1])

    @property
    def total_bytes(self) -> int:
        """Listed bytes of an epoch: stored ones, so those of compressed files are fewer than its records have."""
        return int(self._bytes.sum())

    @property
    def largest_block_bytes(self) -> int:
        """Listed bytes that a block can reach; text that compresses well within row groups may be more."""
        small = self._bytes[~self._alone]
        joined = self._spec.block_bytes - 1 + int(small.max()) if len(small) else 0
        largest = max(min(joined, int(small.sum())), self._spec.block_bytes if self._alone.any() else 0)
        if format_of(self._spec).kind(self._spec) is Kind.TOKENS and self._spec.source.format == "megatron":
            return largest * _MEGATRON_GROWTH
        return largest

    def task(self, place: BlockAddress) -> BlockTask | None:
        """The task of reading the block at `place`; None: the source has ended there.

        `ValueError` if no fragment of an epoch stands there.
        """
        spec, epochs = self._spec, self._spec.source.epochs
        epochs_end = None if epochs is None else math.ceil(epochs)
        if epochs_end is not None and place.epoch >= epochs_end:
            return None
        if not 0 <= place.fragment < self.fragments_count:
            raise ValueError(f"source {spec.name}: epoch {place.epoch} has no fragment {place.fragment}")
        order = self._order(place.epoch)
        taken = self._taken_from(order, place.fragment)
        end = place.fragment + len(taken)
        whole = epochs is None or place.epoch + 1 <= epochs
        return BlockTask(
            place,
            tuple(map(self.fragment, taken)),
            block_key(spec.seed, place.epoch, spec.name, taken[0], place.block),
            bool(self._alone[taken[0]]),
            BlockAddress(place.epoch, end, 0) if end < self.fragments_count else BlockAddress(place.epoch + 1, 0, 0),
            epochs_end,
            None if whole or epochs is None else epochs - place.epoch,
        )

    def fragment(self, index: int) -> Fragment:
        """Fragment `index` in the order of the listing."""
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        file, unit = self.listing.files[number], self._units[number]
        within = index - int(self._firsts[number])
        if unit is Unit.PARTS:
            if within >= len(file.parts):  # of a file that has been replaced by one with fewer
                return Fragment(number, _ref(file)._replace(size=0), 0, 0, within)
            before = sum(records for records, _ in file.parts[:within])
            return Fragment(number, _ref(file), 0, file.parts[within][1], within, before)
        if unit is Unit.WHOLE:
            return Fragment(number, _ref(file), 0, file.size)
        begin = within * self.range_bytes
        other = self._names.get(format_of(self._spec).beside(file.name))
        beside = None if other is None else _ref(self.listing.files[other])
        last = index + 1 == self._firsts[number + 1]
        end = file.size if last else min(begin + self.range_bytes, file.size)
        ref = _ref(file) if begin < end else _ref(file)._replace(size=0)
        return Fragment(number, ref, begin, end, beside=beside)

    def holding(self, file: int, offset: int) -> range:
        """The fragments, in the order of the listing, of which one holds the record at `offset` of a file, if any does."""
        first, end = (int(number) for number in self._firsts[file : file + 2])
        unit = self._units[file]
        where = format_of(self._spec).where(self._spec, self.fragment(first), offset) if first < end else None
        if where is None or unit is Unit.WHOLE:
            return range(first, end)
        if unit is Unit.PARTS:
            rows = np.cumsum([records for records, _ in self.listing.files[file].parts])
            first += int(np.searchsorted(rows, where, side="right"))
        else:
            first = min(first + where // self.range_bytes, end - 1)
        return range(first, min(first + 1, end))

    def block_with(self, epoch: int, fragment: int) -> BlockAddress:
        """The first block of an epoch in which a fragment, in the order of the listing, stands."""
        order = self._order(epoch)
        place, first = order.index(fragment), 0
        while True:
            taken = len(self._taken_from(order, first))
            if place < first + taken:
                return BlockAddress(epoch, first, 0)
            first += taken

    def _order_of(self, epoch: int) -> list[int]:
        spec = self._spec
        return fragment_order(
            spec.seed, epoch, spec.name, self.fragments_count, shuffle=spec.source.shuffle is not None
        )

    def _taken_from(self, order: list[int], first: int) -> list[int]:
        """The fragments of the block that begins at `first`."""
        taken: list[int] = []
        total = 0
        for place in range(first, len(order)):
            index = order[place]
            if taken and self._alone[index]:
                break
            taken.append(index)
            total += int(self._bytes[index])
            if self._alone[index] or total >= self._spec.block_bytes:
                break
        return taken


def _ref(file: CorpusFile) -> FileRef:
    return FileRef(file.location, file.size, file.etag, file.head, file.name)
