"""Records of different sizes, end to end in one array: of bytes, of token ids, of rows, of the ends of documents.

It is pickled by its two arrays, which protocol 5 keeps beside the pickle and maps where it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.arrays import Integers, Mask


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Record i is `values[ends[i - 1]:ends[i]]`; `ends` never descend, and the last one is the number of values."""

    values: NDArray[Any]  # [all, …]
    ends: Integers

    @classmethod
    def of(cls, records: Sequence[NDArray[Any]], none: NDArray[Any]) -> Self:
        """`none`: an array without a value, of their type and shape."""
        return cls(np.concatenate([none, *records]), np.cumsum(np.array([len(one) for one in records], np.int64)))

    @classmethod
    def of_bytes(cls, records: Sequence[bytes]) -> Self:
        """As values of uint8."""
        return cls(
            np.frombuffer(b"".join(records), np.uint8), np.cumsum(np.array([len(one) for one in records], np.int64))
        )

    @classmethod
    def join(cls, many: Sequence[Self]) -> Self:
        """The records of all, one or more, one after the other."""
        before = np.cumsum([0, *(len(one.values) for one in many[:-1])])
        ends = [one.ends + begin for one, begin in zip(many, before.tolist(), strict=True)]
        return cls(np.concatenate([one.values for one in many]), np.concatenate(ends))

    def none_of(self, count: int) -> Self:
        """So many records without a value."""
        return type(self)(self.values[:0], np.zeros(count, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, record: int) -> NDArray[Any]:
        """As a view."""
        return self.values[int(self.ends[record - 1]) if record else 0 : int(self.ends[record])]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.values[begin:end] for begin, end in pairwise([0, *self.ends.tolist()]))

    @property
    def begins(self) -> Integers:
        begins = np.zeros(len(self.ends), np.int64)
        begins[1:] = self.ends[:-1]
        return begins

    @property
    def lengths(self) -> Integers:
        return self.ends - self.begins

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.ends.nbytes

    def part(self, first: int, last: int) -> Self:
        """Records `first` … `last` - 1, their values as a view."""
        begin, end = (int(self.ends[record - 1]) if record else 0 for record in (first, last))
        return type(self)(self.values[begin:end], self.ends[first:last] - begin)

    def take(self, order: Integers) -> Self:
        """The records of these numbers, in this order; one may come several times."""
        return self.gather([self], np.zeros(len(order), np.int64), order)

    @classmethod
    def gather(cls, many: Sequence[Self], of: Integers, record: Integers) -> Self:
        """Record `record[i]` of `many[of[i]]`, for each i."""
        begins, ends = bounds(many, of, record)
        return cls(slices([one.values for one in many], of, begins, ends), np.cumsum(ends - begins))


def places(many: Sequence[Sized], of: Integers, record: Integers) -> Integers:
    """The number of record `record[i]` of `many[of[i]]` among the records of all, for each i."""
    found: Integers = np.cumsum([0, *map(len, many[:-1])])[of] + record
    return found


def bounds(many: Sequence[Ragged], of: Integers, record: Integers) -> tuple[Integers, Integers]:
    """Where record `record[i]` begins and ends in the values of `many[of[i]]`."""
    ends, place = np.concatenate([one.ends for one in many]), places(many, of, record)
    return np.where(record > 0, ends[place - 1], 0), ends[place]


def slices(many: Sequence[NDArray[Any]], of: Integers, begins: Integers, ends: Integers) -> NDArray[Any]:
    """`many[of[i]][begins[i]:ends[i]]` for each i, end to end. Slices: indices of all values would cost more than copies."""
    places = zip(of.tolist(), begins.tolist(), ends.tolist(), strict=True)
    return np.concatenate([many[0][:0], *(many[one][begin:end] for one, begin, end in places)])


def joined_masks(masks: Sequence[Mask | None], lengths: Sequence[int]) -> Mask | None:
    """The masks of records, end to end. Without one, all of a record is learned; None: all of every record."""
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, lengths, strict=True)
    return np.concatenate([np.ones(length, np.uint8) if mask is None else mask for mask, length in pairs])
