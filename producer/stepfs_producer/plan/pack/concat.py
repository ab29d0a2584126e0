"""Documents end to end in the order drawn, cut where a row is full; the last one where the step is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """`tokens` tokens of sample `sample`, from its token `first` on, stand in `row`."""

    sample: int
    first: int
    tokens: int
    row: int


def concat(lengths: Sequence[int], *, rows: int, sequence_length: int) -> list[Part]:
    """Where the samples stand. The last drawn one may be taken in part; the others are whole."""
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
