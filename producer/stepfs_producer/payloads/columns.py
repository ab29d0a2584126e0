"""The arrays that samples carry beside their tokens, such as patches of images.

`Columns` is one value from the transform to the file. Planning needs its `counts` alone; its rows are bytes that only the
writing of the file looks at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

COUNTS: Final = "_counts"  # behind a column's name: the array with its rows per span


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column as the plan declares it."""

    name: str
    dtype: str  # of numpy
    shape: tuple[int, ...]  # of a row
    own_file: bool = False  # it has a file beside the rank's

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def none(self) -> NDArray[Any]:
        return np.empty((0, *self.shape), np.dtype(self.dtype).newbyteorder("<"))


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of consecutive samples, in the order of their specs."""

    counts: Integers  # [samples, columns]: rows
    rows: tuple[NDArray[Any], ...]  # of each column: [rows, *shape], sample after sample

    @classmethod
    def of_samples(cls, specs: Sequence[ColumnSpec], given: Sequence[Mapping[str, NDArray[Any]]]) -> Self:
        """Each sample gives some of the columns."""
        counts = np.array([[len(one.get(spec.name, ())) for spec in specs] for one in given], np.int64)
        rows = (np.concatenate([spec.none(), *(one[spec.name] for one in given if spec.name in one)]) for spec in specs)
        return cls(counts.reshape(-1, len(specs)), tuple(rows))

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + sum(rows.nbytes for rows in self.rows)

    def part(self, first: int, last: int) -> Self:
        """Samples `first` … `last` - 1, as views."""
        begins, ends = self.counts[:first].sum(axis=0), self.counts[:last].sum(axis=0)
        places = zip(self.rows, begins.tolist(), ends.tolist(), strict=True)
        return type(self)(self.counts[first:last], tuple(rows[begin:end] for rows, begin, end in places))

    def kept(self, samples: NDArray[np.bool_]) -> Self:
        rows = (rows[np.repeat(samples, counts)] for rows, counts in zip(self.rows, self.counts.T, strict=True))
        return type(self)(self.counts[samples], tuple(rows))


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples of `columns`, by number, and the spans that they become."""

    columns: Columns
    samples: Integers
    spans: Integers


def gathered(spans: int, taken: Sequence[Taken]) -> Columns | None:
    """The columns of so many spans; None if nothing is taken."""
    if not taken:
        return None
    counts = np.zeros((spans, taken[0].columns.counts.shape[1]), np.int64)
    for one in taken:
        counts[one.spans] = one.columns.counts[one.samples]
    return Columns(counts, tuple(_rows(taken, column) for column in range(counts.shape[1])))


def _rows(taken: Sequence[Taken], column: int) -> NDArray[Any]:
    pieces: dict[int, NDArray[Any]] = {}
    for one in taken:
        rows, counts = one.columns.rows[column], one.columns.counts[:, column]
        ends = np.cumsum(counts)
        some = counts[one.samples] > 0
        samples = one.samples[some]
        begins = (ends - counts)[samples]
        places = zip(one.spans[some].tolist(), begins.tolist(), ends[samples].tolist(), strict=True)
        pieces |= {span: rows[begin:end] for span, begin, end in places}
    return np.concatenate([taken[0].columns.rows[column][:0], *(pieces[span] for span in sorted(pieces))])
