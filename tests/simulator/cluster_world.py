"""What the processes of a simulated cluster share besides the store, and each one's own wall clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import trio
from damage import Damage
from doubles.trio_clock import TrioClock
from ledger import Ledger

from stepfs._internal.clock import SystemClock
from stepfs.errors import CorruptError, StepfsError, UsageError


class SkewedClock(TrioClock):
    """A wall clock that is `offset_s` ahead and runs `rate` times as fast."""

    def __init__(self, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.offset_s, self.rate = offset_s, rate

    def now_ms(self) -> int:
        ahead_s = self.offset_s + (self.rate - 1.0) * trio.current_time()
        return super().now_ms() + round(ahead_s * 1000)


_wall: ContextVar[SkewedClock] = ContextVar("wall clock")


@contextmanager
def simulated_wall_clocks() -> Iterator[None]:
    """`SystemClock` answers with the wall clock of the simulated process that asks."""
    real = SystemClock.now_ms
    SystemClock.now_ms = lambda self: _wall.get().now_ms()  # type: ignore[method-assign]
    try:
        yield
    finally:
        SystemClock.now_ms = real  # type: ignore[method-assign]


@contextmanager
def inline_threads() -> Iterator[None]:
    """What stepfs gives to a thread (reading a checkpoint directory) happens at once: threads know no virtual time."""
    threads: Any = trio.to_thread
    real = threads.run_sync

    async def run_sync(work: Any, *arguments: Any, **_options: Any) -> Any:
        return work(*arguments)

    threads.run_sync = run_sync
    try:
        yield
    finally:
        threads.run_sync = real


@dataclass
class World:
    """The truth, the goal, what was damaged on purpose, and when it is time to stop."""

    ledger: Ledger
    seed: int
    total_steps: int
    over: trio.Event = field(default_factory=trio.Event)
    clock: SystemClock = field(default_factory=SystemClock)
    lying: bool = False  # the store shows old listings, or hides objects for a moment
    damage: Damage = field(init=False)

    def __post_init__(self) -> None:
        self.damage = Damage(self.ledger)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def set_wall_clock(self, name: str, *, skewed: bool) -> None:
        """From here on this task, and what it starts, lives by the clock of the process `name`."""
        rng = self.rng(f"clock/{name}")
        offset_s, rate = rng.choice((0.0, -3.0, 90.0, -86_400.0, 1e7)), rng.choice((1.0, 0.5, 1.01, 2.0))
        _wall.set(SkewedClock(offset_s, rate) if skewed else SkewedClock())

    def excuses(self, error: BaseException) -> bool:
        """Whether what was damaged explains `error`. Wrong data is never explained."""
        if self.lying and isinstance(error, CorruptError | UsageError):
            return True  # UsageError: a checkpoint beyond the end of a log that was read from an old listing
        return isinstance(error, StepfsError) and self.damage.excuses(error)
