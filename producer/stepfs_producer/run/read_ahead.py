"""How far ahead each source is read: its work, as measured, and its share of the coming steps.

It follows work in seconds: a source of few tokens may need most of the workers, because its records are costly. Marks in
tokens alone would give it one or two. Nothing here can show in a step (hazard P2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

GROUP_S: Final = 0.25  # of work: long beside a round trip, short beside a step
GROUP_RECORDS_FIRST: Final = 1  # of unknown cost: 16 costly ones would hold the first step back for seconds
GROUP_RECORDS_MAX: Final = 1 << 16
GROUP_TOKENS_MAX: Final = 1 << 19  # a few MiB of cheap records, although that is no quarter of a second
STEPS_AHEAD: Final = 3  # the step that is planned, and those while its successors' blocks are read
_GROUPS_AHEAD: Final = 2  # per worker: one under way, and one that waits for an older one
_GROWTH_MAX: Final = 4  # of a group by the one before
_KEPT: Final = 0.8  # weight of the groups so far when another one is done
_BYTES_PER_TOKEN: Final = 8.0  # before the first group: an id, and its part of a short record's address


class Work:
    """Work of one source, measured: an average of its groups in which older ones count less."""

    def __init__(self) -> None:
        self.group_records = GROUP_RECORDS_FIRST  # of the next group
        self._groups = 0.0
        self._records = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._bytes = 0.0

    def note(self, records: int, tokens: int, seconds: float, nbytes: int) -> None:
        """One more group. `nbytes`: of its body."""
        self._groups = _KEPT * self._groups + 1
        self._records = _KEPT * self._records + records
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._bytes = _KEPT * self._bytes + nbytes
        fit_s = GROUP_S * self._records / max(self._seconds, 1e-9)
        fit = min(
            fit_s,
            GROUP_TOKENS_MAX / self.tokens_per_record,
            GROUP_RECORDS_MAX,
            _GROWTH_MAX * self.group_records,
        )
        self.group_records = max(int(fit), 1)

    @property
    def tokens_per_record(self) -> float:
        """Tokens of a mean record, at least 1, also where most records are dropped."""
        return max(self._tokens / self._records, 1.0) if self._records else 1.0

    @property
    def seconds_per_token(self) -> float | None:
        """None before the first group."""
        return self._seconds / max(self._tokens, 1.0) if self._records else None

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / max(self._tokens, 1.0) if self._bytes else _BYTES_PER_TOKEN

    @property
    def group_tokens(self) -> float:
        """About how many the next group gives; where blocks are small, fewer than `group_records` have."""
        whole = self.group_records * self.tokens_per_record
        return min(whole, 2 * max(self._tokens / self._groups, 1.0)) if self._groups else whole


def marks_of(coming: Sequence[int], works: Sequence[Work], workers: int) -> list[tuple[int, int]]:
    """Per source: tokens to keep ahead, and the most groups under way. `coming`: its tokens of `STEPS_AHEAD` steps.

    At least these, and where they are less work than the workers that the source keeps busy have in hand, that work.
    """
    known = [
        (tokens, rate)
        for tokens, work in zip(coming, works, strict=True)
        if (rate := work.seconds_per_token) is not None
    ]
    unknown = sum(tokens * rate for tokens, rate in known) / max(sum(tokens for tokens, _ in known), 1) or 1.0
    seconds = [
        tokens * (unknown if work.seconds_per_token is None else work.seconds_per_token)
        for tokens, work in zip(coming, works, strict=True)
    ]
    total = max(sum(seconds), 1e-9)
    marks = []
    for tokens, work, of_source in zip(coming, works, seconds, strict=True):
        busy = workers * of_source / total
        in_hand = tokens // STEPS_AHEAD + math.ceil(_GROUPS_AHEAD * busy * work.group_tokens)
        marks.append((max(tokens, in_hand), 1 + min(math.ceil(busy), workers)))
    return marks
