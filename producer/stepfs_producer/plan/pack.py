"""Makes the spans of a step from a draw: packs them into rows, gives addresses, orders them as ranks read.

Samples that do not fit must not wait for the next step: a step takes prefixes of its sources, so the *last drawn* samples
are dropped, at least as many tokens as did not fit, and the rest is packed again. The fullest row that has room takes a
document; among rows equally full, the one that became so last.

This takes most of the time of a step, so documents of one length are placed in one turn: a row that has taken one of them
is the fullest that has room for the next, until it has none, and then comes the next of the rows that were equally full.
Free lengths are few, so a bisection over the distinct ones replaces a search over rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.mix import Drawn
from stepfs_producer.plan.rules import Packing, Rules
from stepfs_producer.plan.samples import Samples
from stepfs_producer.plan.spans import Span


class _Rows:
    """Rows by how many tokens are free in them."""

    def __init__(self, rows: int, length: int) -> None:
        self._free = [length]  # distinct, ascending
        self._rows: list[list[int]] = [[] for _ in range(length + 1)]  # by free tokens
        self._rows[length] = list(range(rows - 1, -1, -1))

    def take(self, tokens: int, documents: int) -> list[int]:
        """Place documents of `tokens` tokens each: their rows, of as many as there is room for."""
        free, rows_of = self._free, self._rows
        placed: list[int] = []
        while documents:
            at = bisect_left(free, tokens)
            if at == len(free):
                break
            length = free[at]
            here = rows_of[length]
            each = min(length // tokens, documents)
            first = max(len(here) - documents // each, 0)
            rows = here[first:]
            rows.reverse()
            del here[first:]
            rest = length - each * tokens
            if not here:
                del free[at]
            if rest:
                if not rows_of[rest]:
                    insort(free, rest)
                rows_of[rest] += rows
            documents -= each * len(rows)
            placed += rows if each == 1 else [row for row in rows for _ in range(each)]
        return placed


def best_fit(lengths: Sequence[int], *, rows: int, sequence_length: int) -> list[int]:
    """The row of each kept sample, in the order drawn; the kept ones are the first of `lengths`.

    No length exceeds `sequence_length`.
    """
    kept = len(lengths)
    while True:
        row_of, free, left = _decreasing(lengths[:kept], rows, sequence_length)
        if not left:
            break
        dropped = 0
        while dropped < left:
            kept -= 1
            dropped += lengths[kept]
    for tokens in lengths[kept:]:
        row = free.take(tokens, 1)
        if not row:
            break
        row_of += row
    return row_of


def _decreasing(lengths: Sequence[int], rows: int, sequence_length: int) -> tuple[list[int], _Rows, int]:
    """The samples' rows, and the free rows, if all samples fit; and the tokens that did not fit."""
    drawn = np.array(lengths, np.int64)
    order = np.argsort(-drawn, kind="stable")
    longest_first = drawn[order]
    bounds = np.flatnonzero(np.diff(longest_first, prepend=0, append=0))
    free = _Rows(rows, sequence_length)
    placed: list[int] = []
    left = 0
    for tokens, (first, last) in zip(longest_first[bounds[:-1]].tolist(), pairwise(bounds.tolist()), strict=True):
        taken = free.take(tokens, last - first)
        placed += taken
        left += tokens * (last - first - len(taken))
    if left:
        return [], free, left
    row_of = np.empty(len(drawn), np.int64)
    row_of[order] = placed
    return row_of.tolist(), free, 0


@dataclass(frozen=True, slots=True)
class Packed:
    """The spans of a step before they are dealt."""

    kept: int  # samples of the draw
    sample: Integers  # of each span: index into the draw
    table: Integers  # of `Span`, then the rows of each column; rank, micro, row and column are still open
    row: Integers
    cut: int

    def tokens_of(self, sample: int) -> int:
        """The tokens that a sample gives."""
        return int(self.table[self.sample == sample, Span.TOKENS].sum())


def room_of(tokens: Integers, document: Integers, align: int) -> Integers:
    """The tokens of a row that spans take, each document's rounded up. `document`: as `documents_of` says it."""
    second = np.where(document > 0, tokens - document, 0)
    found: Integers = -(-(tokens - second) // align) * align - (-second // align) * align
    return found


class RowPart(NamedTuple):
    """`tokens` tokens of sample `sample`, from its token `first` on, stand in `row`."""

    sample: int
    first: int
    tokens: int
    row: int


def concat(lengths: Sequence[int], *, rows: int, sequence_length: int) -> list[RowPart]:
    """Samples end to end in the order drawn, cut where a row is full; the last one where the step is."""
    parts = []
    at, end = 0, rows * sequence_length
    for sample, tokens in enumerate(lengths):
        first = 0
        while first < tokens and at < end:
            count = min(tokens - first, sequence_length - at % sequence_length)
            parts.append(RowPart(sample, first, count, at // sequence_length))
            first += count
            at += count
    return parts


def packed(drawn: Drawn, rules: Rules, samples: Sequence[Samples], *, rows: int, sequence_length: int) -> Packed:
    """The samples in `rows` rows, each document on a multiple of the rules' `align` tokens of its row."""
    if rules.packing is Packing.CONCAT:
        parts = concat(drawn.tokens, rows=rows, sequence_length=sequence_length)
        sample, skip, tokens, row = np.array(parts, np.int64).reshape(-1, len(RowPart._fields)).T
        kept, cut = len(drawn.tokens), sum(part.first + part.tokens < drawn.tokens[part.sample] for part in parts)
    else:
        lengths = drawn.tokens
        if rules.align > 1:
            document = documents_of(drawn, np.arange(len(lengths)), samples)
            lengths = room_of(np.array(lengths, np.int64), document, rules.align).tolist()
        row = np.array(best_fit(lengths, rows=rows, sequence_length=sequence_length), np.int64)
        kept, cut = len(row), 0
        sample, skip, tokens = np.arange(kept), np.zeros(kept, np.int64), np.array(drawn.tokens[:kept], np.int64)
    source = np.array(drawn.source, np.int64)[sample]
    number = np.array(drawn.number, np.int64)[sample]
    table = np.zeros((len(source), len(Span) + len(rules.columns)), np.int64)
    table[:, Span.TOKENS], table[:, Span.SOURCE] = tokens, source
    for index, one in enumerate(samples):
        mine = np.flatnonzero(source == index)
        record = one.record[number[mine]]
        table[mine, Span.EPOCH : Span.FIRST] = one.places[record, :4]
        table[mine, Span.FIRST] = one.first[number[mine]] + skip[mine]
        if one.heads.rows is not None:
            table[mine, len(Span) :] = one.heads.rows[record]
    return Packed(kept, sample, table, row, cut)


def documents_of(drawn: Drawn, sample: Integers, samples: Sequence[Samples]) -> Integers:
    """Per span: `Samples.document` of its record. `sample`: of each span, its index into the draw."""
    found = np.zeros(len(sample), np.int64)
    source = np.array(drawn.source, np.int64)[sample]
    number = np.array(drawn.number, np.int64)[sample]
    for index, one in enumerate(samples):
        if one.document is not None:
            mine = np.flatnonzero(source == index)
            found[mine] = one.document[one.record[number[mine]]]
    return found


def joined(
    table: Integers, row: Integers, document: Integers, fill_rows: NDArray[np.bool_]
) -> tuple[Integers, Integers, Integers]:
    """One span in place of several that go on with each other in a row, as parts of a long document do.

    And their rows and `document`. `fill_rows`: by source, whether its samples may be as long as a row; those of the others
    must not become longer.
    """
    before, after = table[:-1], table[1:]
    record = slice(Span.SOURCE, Span.FIRST)
    same = (before[:, record] == after[:, record]).all(axis=1) & (row[:-1] == row[1:])
    same &= fill_rows[before[:, Span.SOURCE]] & (document[1:] == 0)
    starts = np.flatnonzero(
        np.r_[True, ~(same & (before[:, Span.FIRST] + before[:, Span.TOKENS] == after[:, Span.FIRST]))]
    )
    whole = table[starts]
    whole[:, Span.TOKENS] = np.add.reduceat(table[:, Span.TOKENS], starts)
    return whole, row[starts], document[starts]


def by_document(columns: Mapping[str, Integers], document: Integers) -> tuple[dict[str, Integers], Integers]:
    """`columns` with an entry per document, where a pair's are two; and the span of each. Rows are the first one's."""
    second = document > 0
    if not second.any():
        return dict(columns), np.arange(len(document), dtype=np.int64)
    span = np.repeat(np.arange(len(document), dtype=np.int64), 1 + second)
    begins = np.r_[True, span[1:] != span[:-1]]
    split = document[span]
    found = {name: np.where(begins, values[span], 0) for name, values in columns.items()}
    for name in ("source", "record"):
        found[name] = columns[name][span]
    found["first"] = columns["first"][span] + np.where(begins, 0, split)
    whole = columns["tokens"][span]
    found["tokens"] = np.where(split > 0, np.where(begins, split, whole - split), whole)
    return found, span


def placed(table: Integers, row: Integers, dealt: Integers, room: Integers) -> Integers:
    """The spans with their places, in reading order; those of a row in the order drawn. `room`: as `room_of`."""
    place_of = np.empty(dealt.size, np.int64)
    place_of[dealt.reshape(-1)] = np.arange(dealt.size)
    order = np.argsort(place_of[row], kind="stable")
    spans, place = table[order], place_of[row][order]
    ends = np.cumsum(room[order])
    begins = ends - room[order]
    starts_row = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
    spans[:, Span.COLUMN] = begins - np.repeat(begins[starts_row], np.diff(np.r_[starts_row, len(place)]))
    rest, spans[:, Span.ROW] = np.divmod(place, dealt.shape[2])
    spans[:, Span.RANK], spans[:, Span.MICRO] = np.divmod(rest, dealt.shape[1])
    return spans
