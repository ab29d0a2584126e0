"""One planned step with its tokens and columns: all that a constructor gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.arrays import Integers, Mask
from stepfs_producer.plan.ragged import Ragged, bounds, places, slices
from stepfs_producer.plan.sources import Column
from stepfs_producer.plan.spans import Gathered, Located, Span

_LEARNED: Final = np.uint8(1)
COUNTS: Final = "_counts"  # behind a column's name: the array with its rows per span

NO_TOKEN: Final = -1
Columns = tuple[Ragged, ...]  # of consecutive samples: of each column, in the order of their specs, its rows by sample


class ColumnSpec(NamedTuple):
    """A column of the plan, and its name."""

    name: str
    column: Column
    counted: bool = False  # samples say how many rows they have, and none of them: a reader makes them

    @property
    def row_bytes(self) -> int:
        return 0 if self.counted else self.column.row_bytes

    def none(self) -> NDArray[Any]:
        """No row, as samples have it."""
        return self.column.none()[:, :0] if self.counted else self.column.none()

    @property
    def own_file(self) -> bool:
        """Whether it has a file beside the rank's."""
        return self.column.file == "own"


def columns_of(specs: Sequence[ColumnSpec], given: Sequence[Mapping[str, NDArray[Any]]]) -> Columns:
    """Each sample gives some of the columns."""
    nothing = [spec.none() for spec in specs]
    return tuple(
        Ragged.of([one.get(spec.name, none) for one in given], none) for spec, none in zip(specs, nothing, strict=True)
    )


def rows_of(columns: Columns) -> Integers:
    """[samples, columns]: how many each has."""
    return np.column_stack([column.lengths for column in columns])


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
    columns: Columns = ()  # of the spans; (): no row
    goes_on: NDArray[np.bool_] | None = None  # per span: of the planned span before it; None: each is a planned one
    tags: Ragged | None = None  # UTF-8 of the spans; None: no source of theirs has any

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
        columns=tuple(column.take(np.flatnonzero(kept)) for column in task.columns),
        goes_on=None if task.goes_on is None else task.goes_on[kept],
        tags=None if task.tags is None else task.tags.take(np.flatnonzero(kept)),
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
    tagged: bool = False  # a source of the plan has tags, so each file says those of its spans

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

    ids: Ragged  # int32; a record that is no sample has none
    mask: Mask | None  # per id: 0 where the loss ignores it; None: nowhere
    files: Integers  # per record
    offsets: Integers
    columns: Columns = ()  # of the records; (): of a source that gives none
    documents: Ragged | None = None  # see `Heads`
    sides: Integers | None = None  # per record: of its first document 1, chosen, or 2, rejected; None: of no pair
    tags: Ragged | None = None  # per record: UTF-8; None: of a source without


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
    assert groups, "a step has a token"
    spans, every = step.spans, [group.ids for group in groups]
    of, record, tokens = spans[:, Gathered.GROUP], spans[:, Gathered.RECORD], spans[:, Span.TOKENS]
    begins, ends = bounds(every, of, record)
    begins = begins + spans[:, Gathered.FIRST]
    after = begins + tokens
    assert (after <= ends).all(), "every span lies in its record"
    before, ends_document = _documents(groups, of, begins, after)
    follows = (after < ends) & ~ends_document

    def taken(values: Sequence[NDArray[Any]], nothing: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """What stands in the spans, and what follows each in its document."""
        following = np.full(len(spans), nothing, values[0].dtype)
        following[follows] = slices(values, of[follows], after[follows], after[follows] + 1)
        return slices(values, of, begins, after), following

    ids, following = taken([one.values for one in every], NO_TOKEN)
    mask = following_mask = None
    if any(group.mask is not None for group in groups):
        learned = [np.broadcast_to(_LEARNED, len(one.values)) for one in every]
        masks = zip(groups, learned, strict=True)
        mask, following_mask = taken([one if group.mask is None else group.mask for group, one in masks], 1)
    place = places(every, of, record)
    address = [np.concatenate([getattr(group, name) for group in groups])[place] for name in ("files", "offsets")]
    sides = [np.zeros(len(group.ids), np.int64) if group.sides is None else group.sides for group in groups if pairs]
    more = [np.concatenate(sides)[place]] if pairs else []
    table = np.column_stack([spans[:, : Gathered.GROUP], *address, spans[:, Gathered.FIRST], *more])
    columns = _columns(groups, of, record)
    rows = rows_of(columns) if columns else np.zeros_like(step.rows)
    assert np.array_equal(rows, step.rows), "columns stay with their tokens"  # hazard P17
    task = StepTask(
        step.shape,
        step.sequence_length,
        step.sources,
        table,
        ids,
        following,
        mask,
        following_mask,
        columns,
        tags=_gathered([group.tags for group in groups], groups, of, record),
    )
    return _parted(task, before, align) if before.any() else task


def _documents(
    groups: Sequence[SampleGroup], of: Integers, begins: Integers, after: Integers
) -> tuple[Integers, NDArray[np.bool_]]:
    """Of each span: its tokens before the second document of a pair, or 0; whether it ends a document of several."""
    if all(group.documents is None for group in groups):
        return np.zeros(len(of), np.int64), np.zeros(len(of), np.bool_)
    cuts, base = [], np.cumsum([0, *(len(group.ids.values) for group in groups)])
    for group, begin in zip(groups, base[:-1].tolist(), strict=True):
        if group.documents is not None:
            cuts.append(group.documents.values + np.repeat(group.ids.begins + begin, group.documents.lengths))
    edges, begins, after = np.append(np.concatenate(cuts), NO_TOKEN), begins + base[of], after + base[of]
    first, last = np.searchsorted(edges[:-1], begins, side="right"), np.searchsorted(edges[:-1], after)
    assert (last - first <= 1).all(), "of the spans, a pair alone has two documents"
    return np.where(last > first, edges[first] - begins, 0), edges[last] == after


def _columns(groups: Sequence[SampleGroup], of: Integers, record: Integers) -> Columns:
    """Those of the spans; () if no group has any."""
    number = max(len(group.columns) for group in groups)
    each = [[group.columns[one] if group.columns else None for group in groups] for one in range(number)]
    found = (_gathered(one, groups, of, record) for one in each)
    return tuple(one for one in found if one is not None)


def _gathered(
    values: Sequence[Ragged | None], groups: Sequence[SampleGroup], of: Integers, record: Integers
) -> Ragged | None:
    """What groups have of their records, by span; None if no group has any."""
    some = next((one for one in values if one is not None), None)
    if some is None:
        return None
    known = zip(values, groups, strict=True)
    return Ragged.gather([some.none_of(len(group.ids)) if one is None else one for one, group in known], of, record)


def _parted(task: StepTask, before: Integers, align: int) -> StepTask:
    """The same with a span of each document. `before`: tokens of a span before its second one, or 0."""
    of = np.repeat(np.arange(len(before)), 1 + (before > 0))
    goes_on = np.r_[False, of[1:] == of[:-1]]
    first = before[of] * goes_on
    spans = task.spans[of]
    spans[:, Span.TOKENS] = np.where((before[of] > 0) & ~goes_on, before[of], spans[:, Span.TOKENS] - first)
    spans[:, Span.COLUMN] += -(-first // align) * align
    spans[:, Located.FIRST] += first
    spans[:, Located.FIRST + 1 :] *= 1 + goes_on[:, None]
    return replace(
        task,
        spans=spans,
        following=np.where(np.r_[of[1:] != of[:-1], True], task.following[of], np.int32(NO_TOKEN)),
        following_mask=None if task.following_mask is None else task.following_mask[of],
        columns=tuple(Ragged(column.values, column.ends[of]) for column in task.columns),
        goes_on=goes_on,
        tags=None if task.tags is None else task.tags.take(of),
    )
