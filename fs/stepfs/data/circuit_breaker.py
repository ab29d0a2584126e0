"""Patience with a source of bytes beside the lake's store: a nearer place, the cache disk. It helps, so it is never
waited for: what comes too late comes from the store, and a source that answers nobody rests.

A request that is late cannot be taken back from its thread. It keeps its buffer, which counts as the readers' memory no
longer, and while two are late the source is not asked.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf

import trio

from stepfs.data.blocks import RangeCheck
from stepfs.data.buffers import Buffer, Pool
from stepfs.data.tuning import TUNING
from stepfs.errors import StepfsError
from stepfs.store.api import Progress

_log = logging.getLogger("stepfs.data")

Read = Callable[[memoryview, Progress], Awaitable[int | None]]


@dataclass(slots=True)
class Attempt:
    """One request, which owns its buffer until its thread is done: a late one still writes."""

    buffer: Buffer
    check: RangeCheck
    got: int | None = None
    error: StepfsError | None = None
    late: bool = False
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False, slots=True)
class Patience:
    """With one source; `name` is for the log."""

    name: str
    pool: Pool
    start_soon: Callable[..., None]  # in a nursery that outlives any load: a hung request must not hold its reader
    _late: int = 0
    _rests_until_s: float = -inf
    _rest_s: float = TUNING.silent_rest_s
    _answered_s: float = -inf

    def is_over(self, *, insists: bool = False) -> bool:
        """Whether the source is not asked now. `insists`: although it rests, because the lake's store does not answer
        either.
        """
        return self._late >= TUNING.late_max or (not insists and trio.current_time() < self._rests_until_s)

    async def wait_for(self, attempt: Attempt, read: Read) -> None:
        """Return once `attempt` has ended, or is `late`: then the request keeps the buffer."""
        self.start_soon(self._run, attempt, read)
        if not await self._in_time(attempt):
            attempt.late = True
            self._late += 1
            self.pool.write_off(attempt.buffer)
            self._failed("too late")
        elif attempt.error is not None:
            self._failed(str(attempt.error))
        else:
            self._answered()

    async def _run(self, attempt: Attempt, read: Read) -> None:
        try:
            attempt.got = await read(attempt.buffer.view(), attempt.check.update)
        except StepfsError as error:
            attempt.error = type(error)(*error.args)  # a traceback would keep the buffer in sight
        finally:
            attempt.done.set()
            self._late -= attempt.late

    async def _in_time(self, attempt: Attempt) -> bool:
        """Wait for the end. False after some time without a byte: a total alone would condemn a source that is only busy."""
        began_s = byte_s = trio.current_time()
        landed = 0
        while True:
            with trio.move_on_after(TUNING.silence_s / 4):
                await attempt.done.wait()
            if attempt.done.is_set():
                return True
            now_s = trio.current_time()
            if attempt.check.landed > landed:
                landed, byte_s = attempt.check.landed, now_s
                self._answered()
            if now_s - byte_s >= TUNING.silence_s or now_s - began_s >= TUNING.answer_most_s:
                return False

    def _answered(self) -> None:
        self._answered_s = trio.current_time()
        self._rests_until_s, self._rest_s = -inf, TUNING.silent_rest_s

    def _failed(self, reason: str) -> None:
        """Rest, if it has answered nobody for a while: else the node, or the source, is only busy."""
        now_s = trio.current_time()
        if now_s < self._rests_until_s or now_s - self._answered_s < TUNING.silence_s:
            return
        text = "%s does not answer (%s): the lake's own store is read, and it is asked again in %.0f s"
        _log.warning(text, self.name, reason, self._rest_s, extra={"alike": self.name})
        self._rests_until_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, TUNING.silent_rest_max_s)
