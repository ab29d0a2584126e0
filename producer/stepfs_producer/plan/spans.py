"""From a draw to the spans of a step: packed into rows, given their addresses, put in the order in which ranks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.cost import Integers
from stepfs_producer.plan.mix import Drawn
from stepfs_producer.plan.pack import best_fit
from stepfs_producer.plan.rules import Packing
from stepfs_producer.plan.samples import Samples
from stepfs_producer.plan.step import SPAN_COLUMNS


@dataclass(frozen=True, slots=True)
class Packed:
    """The spans of a step before they are dealt: where each stands, and in which sample."""

    kept: int  # samples of the draw
    sample: Integers  # index into the draw
    skip: Integers  # tokens of the sample before the span
    tokens: Integers
    row: Integers
    cut: int


def packed(drawn: Drawn, packing: Packing, *, rows: int, sequence_length: int) -> Packed:
    if packing is Packing.CONCAT:
        return _concat(drawn, rows, sequence_length)
    return _best_fit(drawn, rows, sequence_length)


def _best_fit(drawn: Drawn, rows: int, length: int) -> Packed:
    row = best_fit(drawn.tokens, rows=rows, sequence_length=length)
    kept = len(row)
    return Packed(
        kept,
        np.arange(kept, dtype=np.int64),
        np.zeros(kept, np.int64),
        np.array(drawn.tokens[:kept], np.int64),
        np.array(row, np.int64),
        0,
    )


class Part(NamedTuple):
    """`tokens` tokens of sample `sample`, from its token `first` on, stand in `row`."""

    sample: int
    first: int
    tokens: int
    row: int


def concat(lengths: Sequence[int], *, rows: int, sequence_length: int) -> list[Part]:
    """Samples end to end in the order drawn, cut where a row is full; the last one where the step is."""
    parts = []
    at, end = 0, rows * sequence_length
    for sample, tokens in enumerate(lengths):
        first = 0
        while first < tokens and at < end:
            count = min(tokens - first, sequence_length - at % sequence_length)
            parts.append(Part(sample, first, count, at // sequence_length))
            first += count
            at += count
    return parts


def _concat(drawn: Drawn, rows: int, length: int) -> Packed:
    parts = concat(drawn.tokens, rows=rows, sequence_length=length)
    sample, skip, tokens, row = np.array(parts, np.int64).reshape(-1, len(Part._fields)).T
    cut = sum(part.first + part.tokens < drawn.tokens[part.sample] for part in parts)
    return Packed(len(drawn.tokens), sample, skip, tokens, row, cut)


def addresses(drawn: Drawn, packed: Packed, samples: Sequence[Samples], columns: int = 0) -> Integers:
    """Spans with rank, micro, row and column still open; behind their address the rows of so many columns."""
    source = np.array(drawn.source, np.int64)[packed.sample]
    number = np.array(drawn.number, np.int64)[packed.sample]
    table = np.zeros((len(source), len(SPAN_COLUMNS) + columns), np.int64)
    table[:, 4], table[:, 5] = packed.tokens, source
    for index, one in enumerate(samples):
        mine = np.flatnonzero(source == index)
        table[mine, 6:10] = one.places[one.record[number[mine]], :4]
        table[mine, 10] = one.first[number[mine]] + packed.skip[mine]
        if one.rows is not None:
            table[mine, 11:] = one.rows[one.record[number[mine]]]
    return table


def joined(table: Integers, row: Integers, fill_rows: NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """One span in place of several that go on with each other in a row, as parts of a long document do; and their rows.

    `fill_rows`: by source, whether its samples may be as long as a row; those of the others must not become longer.
    """
    before, after = table[:-1], table[1:]
    same = (before[:, 5:10] == after[:, 5:10]).all(axis=1) & (row[:-1] == row[1:]) & fill_rows[before[:, 5]]
    starts = np.flatnonzero(np.r_[True, ~(same & (before[:, 10] + before[:, 4] == after[:, 10]))])
    whole = table[starts]
    whole[:, 4] = np.add.reduceat(table[:, 4], starts)
    return whole, row[starts]


def placed(table: Integers, row: Integers, dealt: Integers) -> Integers:
    """The spans with their places, in reading order; those of a row in the order drawn."""
    place_of = np.empty(dealt.size, np.int64)
    place_of[dealt.reshape(-1)] = np.arange(dealt.size)
    order = np.argsort(place_of[row], kind="stable")
    spans, place = table[order], place_of[row][order]
    ends = np.cumsum(spans[:, 4])
    begins = ends - spans[:, 4]
    starts_row = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
    spans[:, 3] = begins - np.repeat(begins[starts_row], np.diff(np.r_[starts_row, len(place)]))
    rest, spans[:, 2] = np.divmod(place, dealt.shape[2])
    spans[:, 0], spans[:, 1] = np.divmod(rest, dealt.shape[1])
    return spans
