"""A place nearer than the lake's store, with objects of the lake under the same keys: a replica, or copies by any tool.

It decides nothing: a block that is absent, late or wrong there comes from the lake, and every block is verified against the
lake's own log.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

import trio

from stepfs.data.blocks import Block, RangeCheck
from stepfs.data.buffers import Buffer, Pool
from stepfs.data.counters import DataCounts
from stepfs.data.tuning import TUNING
from stepfs.errors import StepfsError
from stepfs.format.ids import Step
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.data")


class Answer(Enum):
    """What a request at the place gave."""

    BYTES = auto()  # they are in the buffer, verified
    ABSENT = auto()
    NONE = auto()  # wrong bytes, an error, or the place rests; the buffer may be used again
    LATE = auto()  # the request goes on, and keeps the buffer


@dataclass(slots=True)
class _Attempt:
    """One request, which owns its buffer until its thread is done: a late one still writes."""

    buffer: Buffer
    check: RangeCheck
    got: int | None = None
    error: StepfsError | None = None
    late: bool = False
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False, slots=True)
class Near:
    """The nearer place of one mount or reader."""

    store: Store
    pool: Pool
    counts: DataCounts
    start_soon: Callable[..., None]  # in a nursery that outlives any load: a hung request must not hold its reader
    _rests_until_s: float = -inf
    _rest_s: float = TUNING.near_rest_s
    _answered_s: float = -inf
    _newest: Step | None = None  # that was found here; None: nothing was

    async def look(self, lake_id: str) -> None:
        """Look until the place has data of this lake; warn of one that has none."""
        told = False
        while self._newest is None:
            try:
                found = await self.store.list(f"{lake_id}/data/", limit=1)
                reason = "has no data of this lake"
            except StepfsError as error:
                found, reason = [], f"cannot be read ({error})"
            if found:
                self._newest = self._newest or Step(0)
                return
            if not told:
                _log.warning("%s %s: until it has, and answers, the lake's own store is read", self.store.url, reason)
            told = True
            await trio.sleep(TUNING.near_absent_s)

    def may_come(self, step: Step) -> bool:
        """Whether absent data of the step may be on its way: a step behind it has come already, or nothing ever did."""
        return self._newest is not None and step >= self._newest

    async def load(self, block: Block, buffer: Buffer, *, insists: bool = False) -> Answer:
        """Read the block into `buffer`. `insists`: although the place rests, because the lake's store does not answer either."""
        if not insists and trio.current_time() < self._rests_until_s:
            return Answer.NONE
        attempt = _Attempt(buffer, RangeCheck(block.range, buffer))
        self.start_soon(self._get, attempt, block)
        if not await self._in_time(attempt):
            attempt.late = True
            self._failed("too late")
            return Answer.LATE
        if attempt.error is not None:
            self._failed(str(attempt.error))
            return Answer.NONE
        self._answered()
        if attempt.got is None:
            self.counts.near_absent += 1
            return Answer.ABSENT
        problem = attempt.check.problem(attempt.got)
        if problem is not None:
            self.counts.near_corrupt += 1
            name = f"{self.store.url}/{block.entry.tgb.key}"
            _log.warning("%s: %s; copy the object again", name, problem, extra={"alike": ("near", name)})
            return Answer.NONE
        self._newest = max(block.step, self._newest or Step(0))
        self.counts.near_hits += 1
        self.counts.near_bytes += attempt.got
        return Answer.BYTES

    async def _in_time(self, attempt: _Attempt) -> bool:
        """Wait for the end. False after some time without a byte: a total alone would condemn a place that is only busy."""
        began_s = byte_s = trio.current_time()
        landed = 0
        while True:
            with trio.move_on_after(TUNING.near_silence_s / 4):
                await attempt.done.wait()
            if attempt.done.is_set():
                return True
            now_s = trio.current_time()
            if attempt.check.landed > landed:
                landed, byte_s = attempt.check.landed, now_s
                self._answered()
            if now_s - byte_s >= TUNING.near_silence_s or now_s - began_s >= TUNING.near_most_s:
                return False

    async def _get(self, attempt: _Attempt, block: Block) -> None:
        buffer = attempt.buffer
        try:
            attempt.got = await self.store.read_into(
                block.entry.tgb.key, block.range.offset, buffer.view(), attempt.check.update
            )
        except StepfsError as error:
            attempt.error = type(error)(*error.args)  # a traceback would keep the buffer in sight
        finally:
            attempt.done.set()
            if attempt.late:
                self.pool.give(buffer)

    def _answered(self) -> None:
        self._answered_s = trio.current_time()
        self._rests_until_s, self._rest_s = -inf, TUNING.near_rest_s

    def _failed(self, reason: str) -> None:
        """Rest, if it has answered nobody for a while: else the node, or the place, is only busy."""
        self.counts.near_failed += 1
        now_s = trio.current_time()
        if now_s < self._rests_until_s or now_s - self._answered_s < TUNING.near_silence_s:
            return
        text = "%s does not answer (%s): the lake's own store is read, and it is asked again in %.0f s"
        _log.warning(text, self.store.url, reason, self._rest_s, extra={"alike": "near"})
        self._rests_until_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, TUNING.near_rest_max_s)
