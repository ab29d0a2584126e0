"""Megatron's indexed datasets: `.bin` holds token ids end to end, `.idx` says where sequences and documents begin.

A record is a document that is not empty; it belongs to the range of `.bin` bytes in which it begins. Of the index
only the parts for a range are read: a search by pages, then the entries of its documents.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from os import path
from typing import Any, Final

import numpy as np

from stepfs.errors import AbsentError, CorruptError, UsageError
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.sources.files import Format, FoundFile, OpenFile, open_listed
from stepfs_producer.sources.record import Fragment, Kind, Raw, SourceSpec, Unit, Value, tokens_of

_BIN: Final = ".bin"
_IDX: Final = ".idx"
_BOTH: Final = ".[bi][id][nx]"  # a glob for the two files of a data set
_HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, type, sequences, entries of document_indices
_MAGIC: Final = b"MMIDIDX\0\0"
_TYPES: Final = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_PAGE_BYTES: Final = 64 << 10
_PAGES_MAX: Final = 64
_READ_BYTES: Final = 1 << 20


class MegatronFormat(Format):
    """Token ids of documents."""

    suffixes = (_BIN, _IDX)

    def kind(self, spec: SourceSpec) -> Kind:  # noqa: ARG002
        return Kind.TOKENS

    def entries(self, files: Sequence[str]) -> Sequence[str]:
        return [_both(entry) for entry in files]

    def choose(self, spec: SourceSpec, found: Sequence[FoundFile]) -> list[FoundFile]:  # noqa: ARG002
        names = {file.name for file in found}
        for file in found:
            if file.name.endswith(_BIN) and self.beside(file.name) not in names:
                raise AbsentError(f"{file.location} has no {_IDX} file beside it; restore that, or leave it out")
        return [file for file in found if file.name.endswith(_BIN) or f"{file.name[:-4]}{_BIN}" in names]

    def unit(self, name: str) -> Unit:
        return Unit.RANGES if name.endswith(_BIN) else Unit.NONE

    def beside(self, name: str) -> str:
        return name.removesuffix(_BIN) + _IDX if name.endswith(_BIN) else ""

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        """One pair for an index: its documents, and the bytes of a token; none for another file."""
        if not file.location.endswith(_IDX):
            return ()
        index = _Index(file)
        return ((index.documents, index.dtype.itemsize),)

    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        assert fragment.beside is not None
        with open_listed(spec, fragment.beside) as beside:
            index = _Index(beside)
            first, begins, ends = index.documents_in(fragment.begin, fragment.end, fragment.ref.size)
        with open_listed(spec, fragment.ref) as file:
            yield from _documents(fragment.file, file, index.dtype, first, begins, ends)

    def where(self, spec: SourceSpec, first: Fragment, offset: int) -> int | None:
        assert first.beside is not None
        with open_listed(spec, first.beside) as beside:
            return _Index(beside).begin_of(offset, first.ref.size)

    def decode(self, spec: SourceSpec, stored: Any) -> Value:  # noqa: ARG002
        return tokens_of(stored)


def _both(entry: str) -> str:
    if entry.endswith((_BIN, _IDX)):
        return entry[:-4] + _BOTH
    # Megatron names both files by their prefix.
    is_prefix = "://" not in entry and not path.lexists(entry) and path.lexists(entry + _BIN)
    return entry + _BOTH if is_prefix else entry


def _documents(
    number: int, file: OpenFile, dtype: np.dtype[Any], first: int, begins: Integers, ends: Integers
) -> Iterator[Raw]:
    at = 0
    while at < len(begins):
        until = max(at + 1, int(np.searchsorted(ends, begins[at] + _READ_BYTES, side="right")))
        base = int(begins[at])
        data = np.frombuffer(file.read(base, int(ends[until - 1])), dtype)
        for document in range(at, until):
            begin, end = int(begins[document]) - base, int(ends[document]) - base
            if begin < end:
                ids = data[begin // dtype.itemsize : end // dtype.itemsize]
                yield Raw(number, first + document, end - begin, ids)
        at = until


def index_of(lengths: Integers, kind: np.dtype[Any]) -> bytes:
    """The `.idx` file of documents that stand end to end in a `.bin`, one sequence each. `lengths`: their tokens."""
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == kind)
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    pointers = np.concatenate([[0], ends])[: len(lengths)].astype("<i8")
    head = _HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return b"".join([head, lengths.astype("<i4").tobytes(), pointers.tobytes(), documents.tobytes()])


class _Index:
    """The parts of an `.idx` file, each an array somewhere in it."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        head = file.read(0, min(_HEADER.size, file.size))
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise CorruptError(f"{file.location}: no Megatron index; replace it or leave it out")
        _, version, code, self._sequences, entries = _HEADER.unpack(head)
        if version != 1 or code not in _TYPES:
            raise UsageError(f"{file.location}: version {version} with data type {code}; write integers, version 1")
        self.dtype = np.dtype(_TYPES[code])
        self.documents = max(0, entries - 1)
        self._lengths_at = _HEADER.size
        self._pointers_at = self._lengths_at + 4 * self._sequences
        self._documents_at = self._pointers_at + 8 * self._sequences
        least = self._documents_at + 8 * entries
        if file.size not in {least, least + self._sequences}:  # with a mode per sequence, or without
            raise self._damaged(f"{file.size} bytes, not {least}")

    def documents_in(self, begin: int, end: int, size: int) -> tuple[int, Integers, Integers]:
        """The documents that begin in bytes [begin, end) of a `.bin` of `size` bytes: number of the first, begins, ends."""
        first, behind = self._first_from(begin, size), self._first_from(end, size)
        if first >= behind:
            return first, np.zeros(0, np.int64), np.zeros(0, np.int64)
        bounds = self._array(self._documents_at + 8 * first, behind - first + 1, "<i8")
        low, high = int(bounds[0]), int(bounds[-1])
        if not 0 <= low <= high <= self._sequences or np.any(np.diff(bounds) < 0):
            raise self._damaged("documents out of order")
        lengths = self._array(self._lengths_at + 4 * low, high - low, "<i4")
        pointers = self._array(self._pointers_at + 8 * low, high - low, "<i8")
        ends = pointers + lengths * self.dtype.itemsize
        if np.any(lengths < 0) or np.any(pointers[1:] != ends[:-1]) or (len(ends) and int(ends[-1]) > size):
            raise self._damaged("sequences that do not follow each other in the .bin file")
        edges = np.append(pointers, ends[-1:])[bounds - low]
        return first, edges[:-1], edges[1:]

    def _first_from(self, place: int, size: int) -> int:
        """The first document that begins at `place` or behind it."""
        low, high = 0, self.documents
        while low < high:
            middle = (low + high) // 2
            if self.begin_of(middle, size) < place:
                low = middle + 1
            else:
                high = middle
        return low

    def begin_of(self, document: int, size: int) -> int:
        """The byte of `.bin` at which a document begins; its end for one that there is not."""
        if document >= self.documents:
            return size
        sequence = self._integer(self._documents_at + 8 * document)
        return size if sequence >= self._sequences else self._integer(self._pointers_at + 8 * sequence)

    def _integer(self, place: int) -> int:
        if not 0 <= place <= self._file.size - 8:
            raise self._damaged("documents out of order")
        page, within = divmod(place, _PAGE_BYTES)
        data = self._page(page)[within : within + 8]
        if len(data) < 8:
            data += self._page(page + 1)[: 8 - len(data)]
        return int.from_bytes(data, "little", signed=True)

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            begin = number * _PAGE_BYTES
            self._pages[number] = self._file.read(begin, min(begin + _PAGE_BYTES, self._file.size))
            if len(self._pages) > _PAGES_MAX:
                self._pages.popitem(last=False)
        return self._pages[number]

    def _array(self, place: int, count: int, dtype: str) -> Integers:
        end = place + count * np.dtype(dtype).itemsize
        return np.frombuffer(self._file.read(place, end), dtype).astype(np.int64)

    def _damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self._file.location}: damaged Megatron index ({why}); replace it or leave it out")
