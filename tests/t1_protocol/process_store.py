"""A simulated process's only door to the world: it can be killed or frozen (SIGSTOP) at any of its awaits.

A frozen process does nothing, but what it has sent travels on, and its timers are due when it wakes. A dead one does
nothing either: the clean-up code that a cancelled task runs in Python would not run after `kill -9`, so it gets no
answers here.

`inside` puts whole other operations into one of its awaits, which is how two-party races are enumerated rather than
hoped for: for every k, all of B happens inside the kth await of A.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from deterministic import pause

from stepfs.errors import StoreUnreachableError
from stepfs.store.faults import Plan, no_faults
from stepfs.store.faulty import FaultyStore, ObjectMap

_STALL_S: Final = 1.0


class ProcessStore(FaultyStore):
    """`FaultyStore` of one life of one process. Pauses are counted; at `freeze_at` the process stops for `freeze_s`."""

    def __init__(self, shared: ObjectMap, *, actor: str, seed: int = 0, plan: Plan = no_faults) -> None:
        super().__init__(shared, actor=actor, seed=seed, plan=plan)
        self.dead = False
        self.freeze_at: int | None = None
        self.freeze_s = 0.0
        self.stalls = 0.0
        self._stalling = random.Random(f"stalls/{actor}/{seed}")
        self.on_freeze: Callable[[], None] | None = None
        self.inside: dict[int, Callable[[], Awaitable[None]]] = {}
        self._frozen_until_s = float("-inf")

    async def _pause(self, seconds: float) -> None:
        if self.dead:
            raise StoreUnreachableError(f"{self.url}: this process was killed")
        if self.pauses + 1 == self.freeze_at:
            self._frozen_until_s = trio.current_time() + self.freeze_s
            if self.on_freeze is not None:
                self.on_freeze()
        if self.stalls and self._stalling.random() < self.stalls:
            self._frozen_until_s = max(self._frozen_until_s, trio.current_time() + _STALL_S)
        meanwhile = self.inside.pop(self.pauses + 1, None)
        if meanwhile is not None:
            await meanwhile()
        self.pauses += 1
        if self.pauses == self.kill_at:
            self.kill()
        await pause(seconds)
        if trio.current_time() < self._frozen_until_s:
            await trio.sleep_until(self._frozen_until_s)
