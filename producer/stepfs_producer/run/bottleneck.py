"""What a run waits for.

Two tasks lie one after the other on the way of every step. One plans: all its time goes to sources, to planning, or to room
for a step. The other appends. Where the first one lacks room, the waits of the second show the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import trio

from stepfs._internal import tracing

BUSY: Final = 0.8  # share of their time that workers can be expected to work

_MOST: Final = 0.75  # of the workers' time: less of it is nobody's alone


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
        if tracing.ring is not None and cause is not Cause.PLANNER:  # which works
            tracing.ring.add("waits", f"for {cause} {source}".rstrip(), seconds)

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
