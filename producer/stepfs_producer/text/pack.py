"""Documents → rows of equal length, nothing dropped, nothing twice.

Documents are laid end to end, each closed by one `end` token, and the stream is cut every `seq_len` tokens. Labels
are the stream shifted by one (a row's last label is the next row's first token), ignored where a document ends.
What a step did not take of a document is a `Cursor`: the place of its record and how many of its tokens are gone. So
a tail costs no bytes in the position; it is read and tokenized again, which gives the same tokens.

Rejected: dropping the remainder (loses source bytes), rows of seq_len + 1 that overlap by one (repeats them),
best-fit packing (cheap to add as another generator here, but reorders documents: the planner's decision).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.text.records import Place, Record
from stepfs_producer.transforms.tokenize import Tokenizer

IGNORED: Final = -100  # the label torch's cross_entropy leaves out
NO_DOCUMENT: Final = -1


@dataclass(frozen=True, slots=True)
class Cursor:
    """What comes next: the record at `place`, without its first `taken` tokens."""

    place: Place
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """`tokens` tokens from `column` of `row` on are bytes [offset, offset + size) of a document.

    Where a model's tokenizer changed the text, no byte belongs to a token: these are the bytes of the whole record.
    """

    row: int
    column: int
    tokens: int
    document: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Rows:
    """A full step's worth of rows, each array of shape [rows, seq_len]."""

    input_ids: NDArray[np.int32]  # padding where the stream has ended
    labels: NDArray[np.int32]  # IGNORED at the end of a document and in padding
    position_ids: NDArray[np.int32]  # from 0 in each row's part of a document
    doc_ids: NDArray[np.int32]  # which part of the row, from 0; NO_DOCUMENT in padding
    spans: tuple[Span, ...]
    cursor: Cursor  # the place after these rows
    documents: int  # that ended in these rows
    tokens: int  # that are not padding
    source_bytes: int  # a record whose bytes belong to no token counts where it ends


@dataclass(slots=True)
class _Filling:
    """Rows being filled, in stream order."""

    shape: tuple[int, int]
    padding: int
    at: int = 0
    parts: int = 0  # of the current row
    documents: int = 0
    source_bytes: int = 0
    spans: list[Span] = field(default_factory=list)
    input_ids: NDArray[np.int32] = field(init=False)
    labels: NDArray[np.int32] = field(init=False)
    position_ids: NDArray[np.int32] = field(init=False)
    doc_ids: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        length = self.shape[0] * self.shape[1]
        self.input_ids = np.full(length, self.padding, np.int32)
        self.labels = np.full(length, IGNORED, np.int32)
        self.position_ids = np.zeros(length, np.int32)
        self.doc_ids = np.full(length, NO_DOCUMENT, np.int32)

    @property
    def full(self) -> bool:
        return self.at == self.shape[0] * self.shape[1]

    def add(self, document: _Document, taken: int) -> int:
        """Fill the current row from the document's token `taken` on. Returns the number of tokens taken."""
        row, column = divmod(self.at, self.shape[1])
        if column == 0:
            self.parts = 0
        count = min(self.shape[1] - column, len(document.ids) - taken)
        here, there = slice(self.at, self.at + count), slice(taken, taken + count)
        self.input_ids[here] = document.ids[there]
        self.labels[here] = document.labels[there]
        self.position_ids[here] = np.arange(count, dtype=np.int32)
        self.doc_ids[here] = self.parts
        first, last = document.bytes_of(taken, taken + count)
        self.spans.append(
            Span(row, column, count, document.record.document, document.record.start + first, last - first)
        )
        if document.edges is not None:
            self.source_bytes += last - first
        elif taken + count == len(document.ids):
            self.source_bytes += len(document.record.data)
        self.at += count
        self.parts += 1
        return count

    def rows(self, cursor: Cursor) -> Rows:
        return Rows(
            self.input_ids.reshape(self.shape),
            self.labels.reshape(self.shape),
            self.position_ids.reshape(self.shape),
            self.doc_ids.reshape(self.shape),
            tuple(self.spans),
            cursor,
            self.documents,
            self.at,
            self.source_bytes,
        )


class _Document:
    """A tokenized record: ids with `end`, labels, and the byte offset before each token if it is known."""

    __slots__ = ("edges", "ids", "labels", "record")

    def __init__(self, record: Record, tokenizer: Tokenizer) -> None:
        self.record = record
        ids = tokenizer.encode(record.data)
        edges = tokenizer.edges(record.data, ids)
        self.ids = np.append(ids, np.int32(tokenizer.end))
        self.labels = np.append(self.ids[1:], np.int32(IGNORED))
        self.edges = edges

    def bytes_of(self, first: int, last: int) -> tuple[int, int]:
        """The record's bytes behind tokens [first, last)."""
        if self.edges is None:
            return 0, len(self.record.data)
        return int(self.edges[first]), int(self.edges[min(last, len(self.edges) - 1)])  # `end` has no byte


def pack(
    records: Iterable[Record], tokenizer: Tokenizer, *, rows: int, seq_len: int, start: Cursor | None = None
) -> Iterator[Rows]:
    """Full steps of `rows` rows, and a last one with padding if the records do not fill it.

    `records` begin at `start.place`. Only as much of `records` is read as the steps taken need, plus one record.
    """
    filling = _Filling((rows, seq_len), tokenizer.padding)
    cursor = start
    for record in records:
        document = _Document(record, tokenizer)
        taken = cursor.taken if cursor is not None and cursor.place == record.here else 0
        while taken < len(document.ids):
            taken += filling.add(document, taken)
            ended = taken == len(document.ids)
            filling.documents += ended
            cursor = Cursor(record.after) if ended else Cursor(record.here, taken)
            if filling.full:
                yield filling.rows(cursor)
                filling = _Filling((rows, seq_len), tokenizer.padding)
    if filling.at:
        assert cursor is not None
        yield filling.rows(cursor)
