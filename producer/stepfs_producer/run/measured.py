"""What a run measures of itself: what it waits for, the work of its sources, and the workers that it needs.

Two tasks lie one after the other on the way of every step. One plans: all its time goes to sources, to planning, or to room
for a step. The other appends. Where the first one lacks room, the waits of the second show the cause.

All of it follows work, in seconds as measured: a source of few tokens may need most of the workers, because its records
are costly. Marks in tokens alone would give it one or two. Nothing here can show in a step (hazard P2).

need = seconds of task work per step × steps per second that trainers take ÷ 0.8. Trainers take the appended steps: while
they lag, an append waits for them. So workers without a pause need a quarter more, until the run waits for trainers, the
store or a pace. None of it can show in a step (hazard P2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import trio

BUSY: Final = 0.8  # share of their time that workers can be expected to work

_MOST: Final = 0.75  # of the workers' time: less of it is nobody's alone
GROUP_S: Final = 0.25  # of work: long beside a round trip, short beside a step
GROUP_RECORDS_FIRST: Final = 1  # of unknown cost: 16 costly ones would hold the first step back for seconds
GROUP_RECORDS_MAX: Final = 1 << 16
GROUP_TOKENS_MAX: Final = 1 << 19  # a few MiB of cheap records, although that is no quarter of a second
STEPS_AHEAD: Final = 3  # the step that is planned, and those while its successors' blocks are read
_GROUPS_AHEAD: Final = 2  # per worker: one under way, and one that waits for an older one
_GROWTH_MAX: Final = 4  # of a group by the one before
_KEPT: Final = 0.8  # weight of the groups so far when another one is done
_BYTES_PER_TOKEN: Final = 8.0  # before the first group: an id, and its part of a short record's address

LOOK_EVERY_S: Final = 5.0  # a look is long beside a task, so that it is no accident that all workers are busy
FEWER_AFTER_S: Final = 60.0  # that fewer would have been enough
FEWER_EVERY_S: Final = 10.0


class Cause(StrEnum):
    """A cause of waiting."""

    SOURCE = "source"
    PLANNER = "planner"
    ROOM = "room"  # for one more step, or workers that make steps
    WORKERS = "workers"  # that make steps
    PACE = "pace"
    STORE = "store"
    TRAINERS = "trainers"


_PLANNING: Final = {Cause.SOURCE, Cause.PLANNER, Cause.ROOM}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The cause of most waiting. `source`: its name if it is one."""

    cause: Cause
    source: str
    workers_wanted: float
    workers: int

    def __str__(self) -> str:
        return f"{self.source or self.cause} ({self.workers_wanted:.1f} of {self.workers} workers wanted)"

    def document(self) -> dict[str, str | float | int | None]:
        return {
            "cause": str(self.cause),
            "source": self.source or None,
            "workers_wanted": round(self.workers_wanted, 3),
            "workers": self.workers,
        }


class Waits:
    """Seconds by cause, and by source where it is one."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Cause, str], float] = {}

    @contextmanager
    def on(self, cause: Cause) -> Iterator[None]:
        began_s = trio.current_time()
        try:
            yield
        finally:
            self.note(cause, trio.current_time() - began_s)

    @contextmanager
    def on_sources(self, missing: Sequence[str], held_s: Callable[[], Mapping[str, float]]) -> Iterator[None]:
        """Note the time for those of the missing sources whose tasks held workers meanwhile.

        If none did, for the sources, or the steps, whose tasks held the workers that they lacked.
        """
        began_s, before_s = trio.current_time(), held_s()
        try:
            yield
        finally:
            self.note_behind(missing, trio.current_time() - began_s, before_s, held_s())

    def note_behind(
        self, missing: Sequence[str], seconds: float, before_s: Mapping[str, float], after_s: Mapping[str, float]
    ) -> None:
        """Note a wait as `on_sources`. `before_s`, `after_s`: seconds that tasks held workers, by source; "": steps."""
        worked_s = {name: value - before_s.get(name, 0.0) for name, value in after_s.items()}
        own_s = {name: worked_s.get(name, 0.0) for name in missing}
        shares = next((of for of in (own_s, worked_s) if any(of.values())), dict.fromkeys(missing, 1.0))
        for name, share in shares.items():
            self.note(Cause.SOURCE if name else Cause.ROOM, seconds * share / sum(shares.values()), name)

    def note(self, cause: Cause, seconds: float, source: str = "") -> None:
        self.seconds[cause, source] = self.seconds.get((cause, source), 0.0) + seconds

    def most(self, held_s: float) -> tuple[Cause, str] | None:
        """The cause of most waiting. `held_s`: seconds that appends waited for trainers, which count as the store's here."""
        seconds = dict(self.seconds)
        store_s = seconds.pop((Cause.STORE, ""), 0.0)
        seconds[Cause.STORE, ""] = max(store_s - held_s, 0.0)
        seconds[Cause.TRAINERS, ""] = held_s
        planning = {key: value for key, value in seconds.items() if key[0] in _PLANNING}
        most = max(planning, key=planning.__getitem__, default=None)
        if most is None or most[0] is not Cause.ROOM:
            return most
        return max(seconds.keys() - planning.keys(), key=seconds.__getitem__)


def bottleneck_of(
    waits: Waits,
    *,
    held_s: float,
    work_s: float,
    elapsed_s: float,
    workers: int,
    worked_s: Mapping[str, float] | None = None,
) -> Bottleneck | None:
    """None if a run waited for nothing. `work_s`: seconds of tasks in `elapsed_s` at the pace of this run. `worked_s`:
    seconds that tasks held workers, by source; where workers are the cause, it is the source that takes most of them.
    """
    most = waits.most(held_s)
    if most is None:
        return None
    if most[0] is Cause.WORKERS and worked_s:
        name = max(worked_s, key=worked_s.__getitem__)
        if name and worked_s[name] > _MOST * sum(worked_s.values()):
            most = Cause.SOURCE, name
    return Bottleneck(*most, work_s / max(elapsed_s, 1e-9) / BUSY, workers)


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


def workers_needed(work_s: float, steps: int, seconds: float, steps_per_second: float | None) -> float:
    """`work_s`: seconds of tasks, and `steps` appended, in these seconds. `steps_per_second`: a pace that is wanted."""
    rate = steps / seconds
    if steps_per_second is not None and steps:
        rate = steps_per_second  # whether it is reached or not
    return work_s / steps * rate / BUSY if steps else work_s / seconds / BUSY


class WorkersWanted:
    """More at once; one fewer every ten seconds, after a minute in which fewer would have been enough."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._workers = least
        self._needs: deque[tuple[float, float]] = deque()  # of the last minute: when, how many
        self._changed_s = -math.inf

    def next(self, now_s: float, need: float) -> int:
        """How many from now on. `need`: since the last call."""
        needs = self._needs
        needs.append((now_s, need))
        while len(needs) > 1 and needs[1][0] <= now_s - FEWER_AFTER_S:
            needs.popleft()
        wanted = min(max(math.ceil(max(one for _, one in needs)), self._least), self._most)
        watched = needs[0][0] <= now_s - FEWER_AFTER_S
        if wanted > self._workers:
            self._workers, self._changed_s = wanted, now_s
        elif wanted < self._workers and watched and now_s - self._changed_s >= FEWER_EVERY_S:
            self._workers, self._changed_s = self._workers - 1, now_s
        return self._workers
