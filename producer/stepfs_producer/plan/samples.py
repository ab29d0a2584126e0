"""The records that follow a source's cursor, as far as they are known: metadata of records → the samples that can be drawn.

A record may be no sample (skipped because it is bad, dropped by a transform), one, or several (longer than the stage's
sequence length and split). Loaders have no stages, so the splitting is done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import RefusedError
from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.sources import Long, SkipBudget
from stepfs_producer.plan.step import SourceState

BAD: Final = -1  # in place of tokens: the record could not be decoded
APART: Final = -1  # in place of a place in the record: the sample is a document, though others of the record are, too
EXCLUDED: Final = -2  # the same: the plan leaves the record out
SKIPS_MIN: Final = 10  # bad records that a budget always allows


@dataclass(frozen=True, slots=True)
class Piece:
    """Metadata of consecutive records of one block, in block order."""

    epoch: int
    fragment: int
    block: int
    records: int  # in the whole block
    first: int  # which record of the block `tokens[0]` is
    tokens: Integers  # per record; 0: dropped by its transform, BAD, or EXCLUDED
    follows: tuple[int, int, int]  # epoch, fragment and block after this block
    rows: Integers | None = None  # [records, columns]; None: no record has any
    parts: Mapping[int, Sequence[int]] = field(
        default_factory=dict
    )  # record → tokens of its documents: samples that are no longer than a row, or those of a pair, which is one
    crc32c: int = 0  # of the whole block
    plain: Sequence[int] = ()  # records that `fim` left as they are, because they are longer than a row


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
    record: Integers  # index of its record in `places`, `bad` and `lost`
    last: NDArray[np.bool_]  # whether the sample ends its record
    places: Integers  # [records, 9]: epoch, fragment, block, record in it, its records and CRC, the block behind it
    bad: NDArray[np.bool_]  # per record
    lost: Integers  # per record: tokens that truncating or dropping loses
    refused_from: int | None  # the sample before which the budget of bad records is exceeded
    dropped: NDArray[np.bool_]  # per record: it is longer than a row, and no sample
    excluded: NDArray[np.bool_]  # per record: the plan leaves it out
    plain: NDArray[np.bool_]  # per record: `fim` left it as it is
    rows: Integers | None = None  # per record: rows of its columns. A record with any is one sample
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
            skipped=was.skipped + int(self.bad[:record].sum()),
            dropped=was.dropped + int(self.dropped[:record].sum()),
            excluded=was.excluded + int(self.excluded[:record].sum()),
            plain=was.plain + int(self.plain[: record + whole].sum()),
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
    places, tokens, rows, fixed, plain = _records(name, state, ahead.pieces)
    document = _documents(len(tokens), fixed, pairs=pairs)
    if pairs:
        fixed = {}
    bad = tokens == BAD
    rest = np.maximum(tokens, 0)
    begun = 0
    if state.into and len(rest) and tokens[0] != EXCLUDED:  # one that is excluded now is left where it was begun
        begun = state.into
        if rest[0] <= begun:
            raise ValueError(f"source {name}: its next record has {rest[0]} tokens, {begun} of them taken")
        rest[0] -= begun
    whole: NDArray[np.bool_] = np.zeros(len(rest), np.bool_) if rows is None else rows.sum(axis=1) > 0
    if begun and whole[:1].any():
        raise ValueError(f"source {name}: its next record has columns, and {begun} tokens of it are taken")
    parts = -(-rest // sequence_length)
    lost = np.zeros(len(rest), np.int64)
    over = rest > sequence_length
    over[list(fixed)] = False
    if long is Long.SPLIT:
        over &= whole
    elif begun:
        over[0] = False  # a document begun under `split` is finished under it
    given = np.full(len(rest), 0 if long is Long.DROP else sequence_length)[over]
    given[whole[over]] = 0
    lost[over] = rest[over] - given
    rest[over] = given
    parts[over] = given > 0
    for index, own in fixed.items():
        parts[index], lost[index] = len(own), rest[index] - sum(own)
    if not parts.any() and lost.any() and places[-1, 0] > state.epoch + 1:
        raise RefusedError(
            f"source {name}: a whole epoch of it gives no sample, because all are longer than {sequence_length} tokens and "
            "dropped; use longer rows or smaller images, or split its documents"
        )
    record = np.repeat(np.arange(len(rest), dtype=np.int64), parts)
    ends = np.cumsum(parts)
    number = np.arange(len(record), dtype=np.int64) - (ends - parts)[record]
    first = number * sequence_length
    counts = np.minimum(rest[record] - first, sequence_length)
    for index, own in fixed.items():
        mine = slice(int(ends[index]) - len(own), int(ends[index]))
        counts[mine], first[mine] = own, np.cumsum(own) - own
    first[record == 0] += begun
    return Samples(
        name,
        state,
        ahead.ended,
        counts,
        first,
        record,
        number == parts[record] - 1,
        places,
        bad,
        lost,
        _refused_from(state, bad, skips, record),
        (parts == 0) & (tokens > 0),
        tokens == EXCLUDED,
        plain,
        rows,
        document,
    )


def _records(
    name: str, state: SourceState, pieces: Sequence[Piece]
) -> tuple[Integers, Integers, Integers | None, dict[int, list[int]], NDArray[np.bool_]]:
    """Places, tokens and rows of the records behind the cursor, the samples of those that are so many, which ones are plain."""
    here = (state.epoch, state.fragment, state.block, state.taken)
    places: list[Integers] = []
    tokens: list[Integers] = []
    rows: list[Integers | None] = []
    parts: dict[int, list[int]] = {}
    plain: list[int] = []
    known = 0
    for piece in pieces:
        block = (piece.epoch, piece.fragment, piece.block)
        behind = here[3] - piece.first if block == here[:3] else -1
        if not 0 <= behind <= len(piece.tokens):
            raise ValueError(f"source {name}: expected metadata from {here} on, not of {block} from {piece.first} on")
        count = len(piece.tokens) - behind
        table = np.empty((count, 9), np.int64)
        table[:] = (*block, 0, piece.records, piece.crc32c, *piece.follows)
        table[:, 3] = np.arange(here[3], here[3] + count)
        places.append(table)
        tokens.append(piece.tokens[behind:])
        rows.append(None if piece.rows is None else piece.rows[behind:])
        parts |= {known + at - behind: list(own) for at, own in piece.parts.items() if at >= behind}
        plain += [known + at - behind for at in piece.plain if at >= behind]
        known += count
        after = here[3] + count
        here = (*piece.follows, 0) if after == piece.records else (*block, after)
    if not places:
        return np.zeros((0, 9), np.int64), np.zeros(0, np.int64), None, {}, np.zeros(0, np.bool_)
    taken = state.into
    while taken > 0 and parts.get(0):
        taken -= parts[0].pop(0)
    if taken and 0 in parts:
        raise ValueError(f"source {name}: {state.into} tokens of its next record end within a document")
    is_plain = np.zeros(known, np.bool_)
    is_plain[plain] = True
    return np.concatenate(places), np.concatenate(tokens).astype(np.int64), _joined(rows, tokens), parts, is_plain


def _documents(records: int, fixed: Mapping[int, Sequence[int]], *, pairs: bool) -> Integers | None:
    if not fixed:
        return None
    found = np.zeros(records, np.int64)
    for index, own in fixed.items():
        found[index] = own[0] if pairs else APART
    return found


def _joined(rows: Sequence[Integers | None], tokens: Sequence[Integers]) -> Integers | None:
    columns = next((one.shape[1] for one in rows if one is not None), None)
    if columns is None:
        return None
    pairs = zip(rows, tokens, strict=True)
    return np.concatenate([np.zeros((len(of), columns), np.int64) if one is None else one for one, of in pairs])


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
