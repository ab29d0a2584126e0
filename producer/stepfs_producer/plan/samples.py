"""The records that follow a source's cursor, as far as they are known: metadata of records → the samples that can be drawn.

A record may be no sample (skipped because it is bad, dropped by a transform), one, or several (longer than the stage's
sequence length and split). Loaders have no stages, so the splitting is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import RefusedError
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.sources import Long, SkipBudget
from stepfs_producer.plan.step import SourceState

BAD: Final = -1  # in place of tokens: the record could not be decoded
APART: Final = -1  # in place of a place in the record: the sample is a document, though others of the record are, too
EXCLUDED: Final = -2  # the same: the plan leaves the record out
SKIPS_MIN: Final = 10  # bad records that a budget always allows


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block without its records."""

    place: BlockAddress
    records: int
    follows: BlockAddress
    ended: bool = False  # the source has no block there: its epochs are used up
    crc32c: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What is known of consecutive records without them: what a transform says of them, and what the planner plans by."""

    tokens: Integers  # per record; 0: dropped by its transform, BAD, or EXCLUDED
    rows: Integers | None = None  # [records, columns]; None: no record has any
    documents: Ragged | None = None
    """Per record that has several documents, or tokens behind them that are lost: the token before which each ends. They are
    samples that are no longer than a row, or those of a pair, which is one."""
    plain: NDArray[np.bool_] | None = None  # per record: `fim` left it as it is, because it is longer than a row

    @classmethod
    def join(cls, many: Sequence[Self]) -> Self:
        """The records of all, one or more."""

        def every(name: str, nothing: Callable[[Any, int], Any]) -> list[Any]:
            found = [getattr(one, name) for one in many]
            some = next((one for one in found if one is not None), None)
            if some is None:
                return []
            return [nothing(some, len(of.tokens)) if one is None else one for one, of in zip(found, many, strict=True)]

        rows, documents, plain = every("rows", _zeros), every("documents", Ragged.none_of), every("plain", _zeros)
        return cls(
            np.concatenate([one.tokens for one in many]),
            np.concatenate(rows) if rows else None,
            Ragged.join(documents) if documents else None,
            np.concatenate(plain) if plain else None,
        )

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.tokens, self.rows, self.documents, self.plain) if one is not None)

    def count(self, mark: int, records: int | None = None) -> int:
        """How many of the first so many are BAD, or EXCLUDED; None: of all."""
        return int((self.tokens[:records] == mark).sum())

    def part(self, first: int, last: int) -> Self:
        """Records `first` … `last` - 1, as views."""
        return type(self)(
            self.tokens[first:last],
            None if self.rows is None else self.rows[first:last],
            None if self.documents is None else self.documents.part(first, last),
            None if self.plain is None else self.plain[first:last],
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive records of one block, in block order; `first`: which record of the block they begin with."""

    block: BlockHead
    first: int
    heads: Heads


@dataclass(frozen=True, slots=True)
class Ahead:
    """The known records of a source from its cursor on. `ended`: nothing follows the pieces."""

    pieces: Sequence[Piece] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples that follow a cursor: arrays of one entry per sample, or per record where noted."""

    name: str
    state: SourceState
    ended: bool
    tokens: Integers
    first: Integers  # first token in the record
    record: Integers  # index of its record in `places`, `heads` and `lost`
    last: NDArray[np.bool_]  # whether the sample ends its record
    places: Integers  # [records, 9]: epoch, fragment, block, record in it, its records and CRC, the block behind it
    heads: Heads  # of the records. One with rows is one sample
    lost: Integers  # per record: tokens that truncating or dropping loses
    refused_from: int | None  # the sample before which the budget of bad records is exceeded
    dropped: NDArray[np.bool_]  # per record: it is longer than a row, and no sample
    document: Integers | None = None
    """Per record: APART if each of its samples is a document, else tokens before the second one of a pair, or 0."""

    def refuse_if_spent(self, index: int) -> None:
        """`RefusedError` if sample `index` lies behind more bad records than the source may have."""
        if self.refused_from is not None and index >= self.refused_from:
            raise RefusedError(
                f"source {self.name}: too many records could not be decoded; repair the files, or allow more with "
                "on_error: {do: skip, at_most: …, in_a_row: …}"
            )

    def state_after(self, kept: int, *, cut: int | None = None) -> SourceState:
        """The source after its first `kept` samples, of which the last gave only `cut` tokens. Debt is not changed."""
        if not kept:
            return self.state
        index = kept - 1
        record = int(self.record[index])
        whole = bool(self.last[index]) and (cut is None or self._truncated(index))
        epoch, fragment, block, taken, records, crc, *follows = self.places[record].tolist()
        given = int(self.tokens[index]) if cut is None else cut
        cursor = (epoch, fragment, block, taken, int(self.first[index]) + given)
        if whole:
            ends_block = taken + 1 == records
            cursor = (*follows, 0, 0) if ends_block else (epoch, fragment, block, taken + 1, 0)
        was = self.state
        return replace(
            was,
            **dict(zip(("epoch", "fragment", "block", "taken", "into"), cursor, strict=True)),
            begun=crc if any(cursor[3:]) else 0,
            records=was.records + record + whole,
            skipped=was.skipped + self.heads.count(BAD, record),
            dropped=was.dropped + int(self.dropped[:record].sum()),
            excluded=was.excluded + self.heads.count(EXCLUDED, record),
            plain=was.plain + (0 if self.heads.plain is None else int(self.heads.plain[: record + whole].sum())),
            run=0,  # bad records behind the last sample are crossed by the next draw, and counted then
            tokens=was.tokens + int(self.tokens[:index].sum()) + given,
        )

    def lost_by(self, kept: int, *, cut: int | None = None) -> int:
        """Tokens that truncating and dropping lost up to the end of the first `kept` samples."""
        if not kept:
            return 0
        record = int(self.record[kept - 1])
        lost = int(self.lost[: record + bool(self.last[kept - 1])].sum())
        if cut is not None and self._truncated(kept - 1):
            lost += int(self.tokens[kept - 1]) - cut
        return lost

    def _truncated(self, index: int) -> bool:
        return bool(self.lost[self.record[index]])


def samples_after(
    name: str,
    state: SourceState,
    ahead: Ahead,
    *,
    sequence_length: int,
    long: Long,
    skips: SkipBudget | None,
    pairs: bool = False,
) -> Samples:
    """The samples behind the cursor of `state`. `pairs`: two documents of a record are one sample.

    `ValueError` if the pieces do not begin at it or leave a gap; `RefusedError` for a source that would be read for ever,
    since none of its records fits.
    """
    places, heads = _known(name, state, ahead.pieces)
    begun = _begun(name, state, heads)
    own = None if pairs else heads.documents
    rest, parts, lost = _divided(heads, begun, own, sequence_length, long)
    if not parts.any() and lost.any() and places[-1, 0] > state.epoch + 1:
        raise RefusedError(
            f"source {name}: a whole epoch of it gives no sample, because all are longer than {sequence_length} tokens and "
            "dropped; use longer rows or smaller images, or split its documents"
        )
    record = np.repeat(np.arange(len(rest), dtype=np.int64), parts)
    number = np.arange(len(record), dtype=np.int64) - (np.cumsum(parts) - parts)[record]
    first = number * sequence_length
    counts = np.minimum(rest[record] - first, sequence_length)
    first[record == 0] += begun
    if own is not None:
        begins = np.concatenate([[0], own.values[:-1]])[: len(own.values)]
        begins[own.begins[own.lengths > 0]] = 0
        mine, taken = (own.lengths > 0)[record], len(own.values) - int(parts[own.lengths > 0].sum())
        first[mine], counts[mine] = begins[taken:], (own.values - begins)[taken:]
    return Samples(
        name,
        state,
        ahead.ended,
        counts,
        first,
        record,
        number == parts[record] - 1,
        places,
        heads,
        lost,
        _refused_from(state, heads.tokens == BAD, skips, record),
        (parts == 0) & (heads.tokens > 0),
        _documents(heads.documents, pairs=pairs),
    )


def _known(name: str, state: SourceState, pieces: Sequence[Piece]) -> tuple[Integers, Heads]:
    """The records behind the cursor: their places, and what is known of them."""
    here = (state.epoch, state.fragment, state.block, state.taken)
    places = [np.zeros((0, 9), np.int64)]
    known = [Heads(np.zeros(0, np.int64))]
    for piece in pieces:
        block, count = piece.block, len(piece.heads.tokens)
        behind = here[3] - piece.first if block.place == here[:3] else -1
        if not 0 <= behind <= count:
            raise ValueError(
                f"source {name}: expected metadata from {here} on, not of {tuple(block.place)} from {piece.first} on"
            )
        table = np.empty((count - behind, 9), np.int64)
        table[:] = (*block.place, 0, block.records, block.crc32c, *block.follows)
        after = piece.first + count
        table[:, 3] = np.arange(here[3], after)
        places.append(table)
        known.append(piece.heads.part(behind, count) if behind else piece.heads)
        here = (*block.follows, 0) if after == block.records else (*block.place, after)
    return np.concatenate(places), Heads.join(known)


def _begun(name: str, state: SourceState, heads: Heads) -> int:
    """Tokens of the first record that are taken. `ValueError` if it cannot be so."""
    begun = state.into
    if not begun or not len(heads.tokens) or heads.tokens[0] == EXCLUDED:
        return 0  # one that is excluded now is left where it was begun
    if heads.documents is not None and len(own := heads.documents[0]) and begun not in own:
        raise ValueError(f"source {name}: {begun} tokens of its next record end within a document")
    if heads.tokens[0] <= begun:
        raise ValueError(f"source {name}: its next record has {max(heads.tokens[0], 0)} tokens, {begun} of them taken")
    if heads.rows is not None and heads.rows[0].any():
        raise ValueError(f"source {name}: its next record has columns, and {begun} tokens of it are taken")
    return begun


def _divided(
    heads: Heads, begun: int, own: Ragged | None, sequence_length: int, long: Long
) -> tuple[Integers, Integers, Integers]:
    """Per record: the tokens that samples may have, the number of samples, the tokens that are lost."""
    rest = np.maximum(heads.tokens, 0)
    rest[:1] -= begun
    parts = -(-rest // sequence_length)
    lost = np.zeros(len(rest), np.int64)
    over = rest > sequence_length
    if own is not None:
        fixed = own.lengths > 0
        over &= ~fixed
        parts[fixed] = own.lengths[fixed]
        parts[:1] -= (own[0] <= begun).sum() if begun else 0
        lost[fixed] = heads.tokens[fixed] - own.values[own.ends[fixed] - 1]
    whole: NDArray[np.bool_] = np.zeros(len(rest), np.bool_) if heads.rows is None else heads.rows.sum(axis=1) > 0
    if long is Long.SPLIT:
        over &= whole
    elif begun:
        over[0] = False  # a document begun under `split` is finished under it
    given = np.where(whole[over] | (long is Long.DROP), 0, sequence_length)
    lost[over] = rest[over] - given
    rest[over] = given
    parts[over] = given > 0
    return rest, parts, lost


def _documents(documents: Ragged | None, *, pairs: bool) -> Integers | None:
    """See `Samples.document`."""
    if documents is None:
        return None
    found = np.where(documents.lengths > 0, APART, 0)
    if pairs:
        found[found < 0] = documents.values[documents.begins[found < 0]]
    return found


def _zeros(some: NDArray[Any], count: int) -> NDArray[Any]:
    return np.zeros((count, *some.shape[1:]), some.dtype)


def _refused_from(state: SourceState, bad: NDArray[np.bool_], skips: SkipBudget | None, record: Integers) -> int | None:
    skipped, run, before = state.skipped, state.run, -1
    for index in np.flatnonzero(bad).tolist():
        skipped += 1
        run = run + 1 if index == before + 1 else 1
        before = index
        share = skips.at_most if skips is not None else Fraction(0)
        allowed = share.numerator * (state.records + index + 1) // share.denominator
        if skips is None or run > skips.in_a_row or skipped > max(SKIPS_MIN, allowed):
            return int(np.searchsorted(record, index))
    return None
