"""Best fit decreasing over a prefix of the draws (arXiv 2404.10830).

Samples that do not fit must not wait for the next step: a step takes prefixes of its sources, so the *last drawn* samples
are dropped, at least as many tokens as did not fit, and the rest is packed again. The fullest row that has room takes a
document; among rows equally full, the one that became so last.

This takes most of the time of a step, so documents of one length are placed in one turn: a row that has taken one of them
is the fullest that has room for the next, until it has none, and then comes the next of the rows that were equally full.
Free lengths are few, so a bisection over the distinct ones replaces a search over rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np


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
