"""One process, one thread, virtual time, seeded scheduling: a run is a function of its seed.

trio batches runnable tasks and shuffles each batch. With the switch that it ships for Hypothesis a batch is first
sorted by task age and the shuffle comes from a generator that can be seeded (trio/_core/_run.py,
`_hypothesis_plugin_setup`), so the interleaving is arbitrary *and* repeatable. `MockClock` jumps to the next deadline
whenever everybody waits, so fifteen-second timeouts cost nothing.

Half of a simulation's time was `trio.sleep`: a cancel scope, a deadline and an exception per pause, twice per request.
`pause` waits on a heap that the clock itself looks at when it jumps.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from stepfs import entropy

T = TypeVar("T")
_run_loop: Any = sys.modules["trio._core._run"]


class Pauses:
    """Who waits on a `MockClock` until when. `MockClock` may not be subclassed, so its jump is replaced on the instance."""

    def __init__(self, clock: MockClock) -> None:
        self._clock: Any = clock
        self._heap: list[tuple[float, int, list[trio.lowlevel.Task]]] = []
        self._number = itertools.count()
        self._jump_to_deadline = self._clock._autojump
        self._clock._autojump = self._jump
        self._clock.current_time = lambda: self._clock._virtual_base  # what it comes to at rate 0

    async def wait(self, seconds: float) -> None:
        waiting = [trio.lowlevel.current_task()]
        due_s = self._clock.current_time() + max(seconds, 0.0)
        heapq.heappush(self._heap, (due_s, next(self._number), waiting))

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            waiting.clear()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _jump(self) -> None:
        """Nobody can run: to the next deadline or the end of the next pause, whichever is earlier."""
        while self._heap and not self._heap[0][2]:
            heapq.heappop(self._heap)
        deadline_s = _run_loop.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if not self._heap or self._heap[0][0] > deadline_s:
            self._jump_to_deadline()
            return
        due_s = self._heap[0][0]
        self._clock.jump(max(due_s - self._clock.current_time(), 0.0))
        while self._heap and self._heap[0][0] <= due_s:
            for task in heapq.heappop(self._heap)[2]:
                trio.lowlevel.reschedule(task)


_pauses: contextvars.ContextVar[Pauses | None] = contextvars.ContextVar("pauses", default=None)


async def pause(seconds: float) -> None:
    """`trio.sleep`, cheaper under `run_seeded`."""
    pauses = _pauses.get()
    if pauses is None:
        await trio.sleep(seconds)
    else:
        await pauses.wait(seconds)


def run_seeded(main: Callable[..., Awaitable[T]], *arguments: object, seed: int) -> T:
    """`trio.run(main, *arguments)` in virtual time, with every random decision drawn from `seed`."""
    before = _run_loop._ALLOW_DETERMINISTIC_SCHEDULING, _run_loop._r.getstate()
    _run_loop._ALLOW_DETERMINISTIC_SCHEDULING = True
    _run_loop._r.seed(seed)

    def start() -> T:
        entropy.seed(seed)
        clock = MockClock(autojump_threshold=0)
        _pauses.set(Pauses(clock))
        return trio.run(main, *arguments, clock=clock)

    try:
        return contextvars.copy_context().run(start)
    finally:
        _run_loop._ALLOW_DETERMINISTIC_SCHEDULING = before[0]
        _run_loop._r.setstate(before[1])


@contextmanager
def scaled(**sizes: int) -> Iterator[None]:
    """Constants of stepfs made small (SEGMENT_STEPS=4, …), so that a short run crosses every boundary often.

    A name is changed wherever it was imported to; one that no stepfs module has is a mistake of the caller.
    """
    changed: list[tuple[Any, str, int]] = []
    for name, value in sizes.items():
        rooms = [m for n, m in list(sys.modules.items()) if n.startswith("stepfs") and hasattr(m, name)]
        assert rooms, f"no stepfs module has a constant {name}"
        for room in rooms:
            changed.append((room, name, getattr(room, name)))
            setattr(room, name, value)
    try:
        yield
    finally:
        for room, name, value in changed:
            setattr(room, name, value)
