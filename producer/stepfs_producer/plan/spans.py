"""The columns of spans: tables of integers [spans, columns], in the order in which ranks read.

All three tables begin with the same seven columns and end with `FIRST`; in between, a span's record has the address that
is needed at that place. Files have other columns, `stepfs.payload.COLUMNS`.
"""

from __future__ import annotations

from enum import IntEnum


class Span(IntEnum):
    """A span as planned. Behind these columns stand the rows that it has in each column of the plan."""

    RANK = 0
    MICRO = 1
    ROW = 2  # of its micro-batch
    COLUMN = 3
    TOKENS = 4
    SOURCE = 5  # index into the names of sources
    EPOCH = 6
    FRAGMENT = 7
    BLOCK = 8
    RECORD = 9  # in block order
    FIRST = 10  # token of the record


class Gathered(IntEnum):
    """A span on its way to a worker, from column 7 on."""

    GROUP = 7  # number among the groups of the step
    RECORD = 8  # of the group
    FIRST = 9


class Located(IntEnum):
    """A span with its tokens, from column 7 on."""

    FILE = 7  # number in the source's listing
    OFFSET = 8  # of the record in its file: bytes, or rows
    FIRST = 9
