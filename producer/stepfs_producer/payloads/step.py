"""One planned step with its tokens and columns: all that a constructor gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.sources import Column
from stepfs_producer.plan.spans import Gathered, Located, Span

COUNTS: Final = "_counts"  # behind a column's name: the array with its rows per span

NO_TOKEN: Final = -1


class ColumnSpec(NamedTuple):
    """A column of the plan, and its name."""

    name: str
    column: Column

    @property
    def own_file(self) -> bool:
        """Whether it has a file beside the rank's."""
        return self.column.file == "own"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of consecutive samples, in the order of their specs."""

    counts: Integers  # [samples, columns]: rows
    rows: tuple[NDArray[Any], ...]  # of each column: [rows, *shape], sample after sample

    @classmethod
    def of_samples(cls, specs: Sequence[ColumnSpec], given: Sequence[Mapping[str, NDArray[Any]]]) -> Self:
        """Each sample gives some of the columns."""
        counts = np.array([[len(one.get(spec.name, ())) for spec in specs] for one in given], np.int64)
        rows = (
            np.concatenate([spec.column.none(), *(one[spec.name] for one in given if spec.name in one)])
            for spec in specs
        )
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
class ColumnRows:
    """Samples of `columns`, by number, and the spans that they become."""

    columns: Columns
    samples: Integers
    spans: Integers


def gathered_columns(spans: int, taken: Sequence[ColumnRows]) -> Columns | None:
    """The columns of so many spans; None if nothing is taken."""
    if not taken:
        return None
    counts = np.zeros((spans, taken[0].columns.counts.shape[1]), np.int64)
    for one in taken:
        counts[one.spans] = one.columns.counts[one.samples]
    return Columns(counts, tuple(_rows(taken, column) for column in range(counts.shape[1])))


def _rows(taken: Sequence[ColumnRows], column: int) -> NDArray[Any]:
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


@dataclass(frozen=True, slots=True)
class StepTask:
    """A step to be made into payloads, one per rank."""

    shape: tuple[int, int, int]  # ranks, micro-batches, rows of a micro-batch
    sequence_length: int
    sources: tuple[str, ...]
    spans: NDArray[np.int64]  # [spans, columns of `Located`], in reading order
    ids: NDArray[np.int32]  # of all spans, end to end
    following: NDArray[np.int32]  # per span: its document's next token, or NO_TOKEN
    mask: NDArray[np.uint8] | None  # per id: 0 where the loss ignores it
    following_mask: NDArray[np.uint8] | None  # per span: the same of `following`
    columns: Columns | None = None  # of the spans; None: no row
    goes_on: NDArray[np.bool_] | None = None  # per span: of the planned span before it; None: each is a planned one

    @property
    def planned(self) -> NDArray[np.int64]:
        return self.spans if self.goes_on is None else self.spans[~self.goes_on]

    def by_micro_batch(self) -> Self:
        """The same step, of as many ranks as it has micro-batches, with one each."""
        ranks, micro, rows = self.shape
        spans = self.spans.copy()
        spans[:, Span.RANK] = spans[:, Span.RANK] * micro + spans[:, Span.MICRO]
        spans[:, Span.MICRO] = 0
        return replace(self, shape=(ranks * micro, 1, rows), spans=spans)


def cut_to(task: StepTask, ranks: Sequence[int]) -> StepTask:
    """The part of a task that makes the payloads of these ranks alone, in ascending order: the same bytes."""
    owner = task.spans[:, Span.RANK]
    kept = np.isin(owner, ranks)
    ids = np.repeat(kept, task.spans[:, Span.TOKENS])
    spans = task.spans[kept]
    spans[:, Span.RANK] = np.searchsorted(ranks, owner[kept])
    return replace(
        task,
        shape=(len(ranks), *task.shape[1:]),
        spans=spans,
        ids=task.ids[ids],
        following=task.following[kept],
        mask=None if task.mask is None else task.mask[ids],
        following_mask=None if task.following_mask is None else task.following_mask[kept],
        columns=None if task.columns is None else task.columns.kept(kept),
        goes_on=None if task.goes_on is None else task.goes_on[kept],
    )


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """How payloads are written."""

    ext: str
    labels_shifted: bool  # y[i] = x[i+1]; else y = x, for models that shift by themselves
    padding: int  # token id
    vocabulary: int  # ids are below it
    of_micro_batch: bool = False  # a file is one micro-batch of a rank; else all of them
    columns: tuple[ColumnSpec, ...] = ()
    pairs: bool = False  # spans say of which side of a pair they are
    compact: bool = False  # of the arrays, those that determine the others
    align: int = 1  # a document takes a multiple of so many tokens of its row

    def records(self, spans: NDArray[np.int64], shape: tuple[int, int, int]) -> list[int]:
        """How many spans each file has, none in a file beside a rank's; their first columns are rank and micro-batch."""
        ranks, micro, _ = shape
        each = micro if self.of_micro_batch else 1
        of = spans[:, Span.RANK] * each + (spans[:, Span.MICRO] if self.of_micro_batch else 0)
        counts = np.zeros((ranks * each, 1 + sum(column.own_file for column in self.columns)), np.int64)
        counts[:, 0] = np.bincount(of, minlength=ranks * each)
        found: list[int] = counts.ravel().tolist()
        return found


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of consecutive records of a block."""

    begins: Integers  # where each record's tokens begin in `ids`, and where the last's end
    ids: NDArray[np.int32]
    mask: NDArray[np.uint8] | None  # per id: 0 where the loss ignores it; None: nowhere
    files: Integers  # per record
    offsets: Integers
    columns: Columns | None = None  # of the records
    cuts: Integers | None = None  # where in `ids` another document of the same record begins, ascending
    sides: Integers | None = None  # per record: of its first document 1, chosen, or 2, rejected; None: of no pair


@dataclass(frozen=True, slots=True)
class StepSpans:
    """A step to be made, but for its tokens."""

    shape: tuple[int, int, int]  # ranks, micro-batches, rows of a micro-batch
    sequence_length: int
    sources: tuple[str, ...]
    spans: Integers  # [spans, columns of `Gathered`], in reading order
    rows: Integers  # [spans, the plan's columns]: rows that each has beside its tokens


def gathered(step: StepSpans, groups: Sequence[SampleGroup], *, pairs: bool = False, align: int = 1) -> StepTask:
    """The step with its tokens. `groups`: those that its spans name, in the order of their numbers.

    A span of several documents becomes one of each, at a multiple of `align`.
    With `pairs`, each says last: 0 of none, 1 chosen, 2 rejected.
    """
    spans = step.spans
    counts = spans[:, Span.TOKENS]
    ends = np.cumsum(counts)
    masked = any(group.mask is not None for group in groups)
    tokens = int(ends[-1]) if len(ends) else 0
    found = StepTask(
        step.shape,
        step.sequence_length,
        step.sources,
        np.column_stack([spans[:, : Gathered.GROUP], np.zeros((len(spans), 2), np.int64), spans[:, Gathered.FIRST]]),
        np.empty(tokens, np.int32),
        np.full(len(spans), NO_TOKEN, np.int32),
        np.ones(tokens, np.uint8) if masked else None,
        np.ones(len(spans), np.uint8) if masked else None,
    )
    order = np.argsort(spans[:, Gathered.GROUP], kind="stable")
    bounds = np.searchsorted(spans[order, Gathered.GROUP], np.arange(len(groups) + 1))
    assert bounds[-1] == len(spans), "every span lies in a group"
    taken: list[ColumnRows] = []
    cuts = [np.zeros((0, 2), np.int64)]
    of_pairs = np.zeros(len(spans), np.int64)
    for number, group in enumerate(groups):
        mine = order[bounds[number] : bounds[number + 1]]
        cuts.append(_gather_of(group, spans[mine], mine, ends[mine] - counts[mine], found))
        if group.sides is not None:
            of_pairs[mine] = group.sides[spans[mine, Gathered.RECORD]]
        if group.columns is not None:
            taken.append(ColumnRows(group.columns, spans[mine, Gathered.RECORD], mine))
    columns = gathered_columns(len(spans), taken)
    rows = np.zeros_like(step.rows) if columns is None else columns.counts
    assert np.array_equal(rows, step.rows), "columns stay with their tokens"  # hazard P17
    found = replace(found, columns=columns)
    if pairs:
        found = replace(found, spans=np.column_stack([found.spans, of_pairs]))
    return _parted(found, np.concatenate(cuts), align)


def _parted(task: StepTask, cuts: Integers, align: int) -> StepTask:
    """The same with its spans cut. `cuts`: [n, 2] of a span, and its tokens before another document."""
    if not len(cuts):
        return task
    whole = np.column_stack([np.arange(len(task.spans)), np.zeros(len(task.spans), np.int64)])
    places = np.concatenate([whole, cuts])
    of, first = places[np.lexsort(places.T[::-1])].T
    spans, goes_on = task.spans[of], first > 0
    ends_here = np.r_[of[1:] != of[:-1], True]
    spans[:, Span.TOKENS] = np.where(ends_here, spans[:, Span.TOKENS], np.r_[first[1:], 0]) - first
    assert align == 1 or not (goes_on[1:] & goes_on[:-1]).any(), "a pair has two documents"
    spans[:, Span.COLUMN] += -(-first // align) * align
    spans[:, Located.FIRST] += first
    spans[:, Located.FIRST + 1 :] *= 1 + goes_on[:, None]
    columns = task.columns
    if columns is not None:
        columns = Columns(columns.counts[of] * ~goes_on[:, None], columns.rows)
    following = np.where(ends_here, task.following[of], NO_TOKEN).astype(np.int32)
    following_mask = None if task.following_mask is None else task.following_mask[of]
    return replace(
        task,
        spans=spans,
        following=following,
        following_mask=following_mask,
        columns=columns,
        goes_on=goes_on,
    )


def _gather_of(group: SampleGroup, spans: Integers, numbers: Integers, places: Integers, found: StepTask) -> Integers:
    """Fill in the spans of one group. `numbers`: theirs in the step; `places`: where their tokens belong.

    [n, 2]: the spans in which another document begins, and their tokens before it.
    """
    record, counts = spans[:, Gathered.RECORD], spans[:, Span.TOKENS]
    start = group.begins[record] + spans[:, Gathered.FIRST]
    after = start + counts
    cuts = np.zeros(0, np.int64) if group.cuts is None else group.cuts
    first, last = np.searchsorted(cuts, start, side="right"), np.searchsorted(cuts, after)
    ends_document = np.append(cuts, NO_TOKEN)[last] == after
    goes_on = (after < group.begins[record + 1]) & ~ends_document
    assert (after <= group.begins[record + 1]).all(), "every span lies in its record"
    found.following[numbers[goes_on]] = group.ids[after[goes_on]]
    found.spans[numbers, Located.FILE] = group.files[record]
    found.spans[numbers, Located.OFFSET] = group.offsets[record]
    # Slices: indices of all tokens would cost more than their copies.
    for place, begin, count in zip(places.tolist(), start.tolist(), counts.tolist(), strict=True):
        found.ids[place : place + count] = group.ids[begin : begin + count]
        if group.mask is not None and found.mask is not None:
            found.mask[place : place + count] = group.mask[begin : begin + count]
    if group.mask is not None and found.following_mask is not None:
        found.following_mask[numbers[goes_on]] = group.mask[after[goes_on]]
    inside = last - first
    of = np.repeat(np.arange(len(spans)), inside)
    at = np.arange(len(of)) - np.repeat(np.cumsum(inside) - inside, inside) + first[of]
    return np.column_stack([numbers[of], cuts[at] - start[of]])
