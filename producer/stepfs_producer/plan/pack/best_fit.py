"""Best fit decreasing over a prefix of the draws (arXiv 2404.10830).

Samples that do not fit must not wait for the next step: a step takes prefixes of its sources, so the *last drawn* samples
are dropped, at least as many tokens as did not fit, and the rest is packed again. The fullest row that has room takes a
document; among rows equally full, the one that became so last. Free lengths are few, so a bisection over the distinct
ones replaces a search over rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


class _Rows:
    """Rows by how many tokens are free in them."""

    def __init__(self, rows: int, length: int) -> None:
        self._free = [length]  # distinct, ascending
        self._rows = {length: list(range(rows - 1, -1, -1))}

    def take(self, tokens: int) -> int:
        """Place a document: its row, or -1 if no row has room."""
        free, rows_of = self._free, self._rows
        at = bisect_left(free, tokens)
        if at == len(free):
            return -1
        length = free[at]
        rows = rows_of[length]
        row = rows.pop()
        if not rows:
            del free[at], rows_of[length]
        rest = length - tokens
        if rest:
            equal = rows_of.get(rest)
            if equal is None:
                insort(free, rest)
                rows_of[rest] = [row]
            else:
                equal.append(row)
        return row


def best_fit(lengths: Sequence[int], *, rows: int, sequence_length: int) -> list[int]:
    """The row of each kept sample, in the order drawn; the kept ones are the first of `lengths`.

    No length exceeds `sequence_length`.
    """
    kept = len(lengths)
    while True:
        row_of, left = _decreasing(lengths[:kept], rows, sequence_length)
        if left is None:
            break
        dropped = 0
        while dropped < left:
            kept -= 1
            dropped += lengths[kept]
    placed = [*row_of[0]]
    for tokens in lengths[kept:]:
        row = row_of[1].take(tokens)
        if row < 0:
            break
        placed.append(row)
    return placed


def _decreasing(
    lengths: Sequence[int], rows: int, sequence_length: int
) -> tuple[tuple[list[int], _Rows], int | None]:
    """Rows of the samples, and the free rows; the tokens that did not fit, None if all did."""
    free = _Rows(rows, sequence_length)
    take = free.take
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    row_in_order = [take(lengths[index]) for index in order]
    row_of = [0] * len(lengths)
    for index, row in zip(order, row_in_order, strict=True):
        row_of[index] = row
    left = 0
    if -1 in row_in_order:
        left = sum(tokens for tokens, row in zip(lengths, row_of, strict=True) if row < 0)
    return (row_of, free), left or None
