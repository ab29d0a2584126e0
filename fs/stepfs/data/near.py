"""A place nearer than the lake's store, with objects of the lake under the same keys: a replica, or copies by any tool.

It decides nothing: a block that is absent, late or damaged there comes from the lake, and every block is checked against the
lake's own log. A CRC32C finds accidents, no forgery: who writes there must be trusted as who writes to the lake.
"""

import logging
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from math import inf

import trio

from stepfs._internal import tracing
from stepfs.data.blocks import Block, RangeCheck
from stepfs.data.buffers import Buffer
from stepfs.data.circuit_breaker import Attempt, Patience
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


@dataclass(eq=False, slots=True)
class Near:
    """The nearer place of one mount or reader."""

    store: Store
    counts: DataCounts
    patience: Patience
    _newest: Step | None = None  # that was found here; None: nothing was
    _in_vain: int = 0  # waits for absent data, in a row
    _hopeless_until_s: float = -inf  # after some, or a long one

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
        """Whether absent data of the step may be on its way: a step behind it has come already, or nothing ever did. Not
        after a wait in vain: nobody fills a place that has some objects only.
        """
        return self._newest is not None and step >= self._newest and trio.current_time() >= self._hopeless_until_s

    def waited(self, seconds: float) -> None:
        """Absent data was waited for, and did not come until somebody opened it, or at all."""
        self._in_vain += 1
        if seconds >= TUNING.silence_s or self._in_vain >= TUNING.near_in_vain_max:
            self._in_vain, self._hopeless_until_s = 0, trio.current_time() + TUNING.silent_rest_max_s

    async def load(self, block: Block, buffer: Buffer, *, insists: bool = False) -> Answer:
        """Read the block into `buffer`. `insists`: also from a place that rests."""
        if self.patience.is_over(insists=insists):
            return Answer.NONE
        attempt, key = Attempt(buffer, RangeCheck(block.range, buffer)), block.entry.tgb.key
        began_s = trio.current_time()
        await self.patience.wait_for(attempt, partial(self.store.read_into, key, block.range.offset))
        if tracing.ring is not None:
            took_s, found = trio.current_time() - began_s, attempt.got is not None and not attempt.late
            tracing.ring.add(
                "nearer place", f"step {block.step}", took_s, step=block.step, found=found, size=block.range.size
            )
        if attempt.late or attempt.error is not None:
            self.counts.near_failed += 1
            return Answer.LATE if attempt.late else Answer.NONE
        if attempt.got is None:
            self.counts.near_absent += 1
            return Answer.ABSENT
        problem = attempt.check.problem(attempt.got)
        if problem is not None:
            self.counts.near_corrupt += 1
            name = f"{self.store.url}/{key}"
            _log.warning("%s: %s; copy the object again", name, problem, extra={"alike": ("near", name)})
            return Answer.NONE
        if block.step > (self._newest or -1):
            self._newest, self._in_vain = block.step, 0
        self.counts.near_hits += 1
        self.counts.near_bytes += attempt.got
        return Answer.BYTES
