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
from doubles.faults import Plan, Told, no_faults
from doubles.faulty_store import Event, FaultyStore, ObjectMap, usual_latency
from virtual_loop import pause

from stepfs.errors import StoreUnreachableError

_LOCKED_OUT_S: Final = 0.01  # until the server has said no
_NEVER: Final = float("-inf")


class ProcessStore(FaultyStore):
    """`FaultyStore` of one life of one process. Pauses are counted; at `freeze_at` the process stops for `freeze_s`."""

    def __init__(
        self,
        shared: ObjectMap,
        *,
        actor: str,
        seed: int = 0,
        plan: Plan = no_faults,
        page: int | None = None,
        times: float = 1.0,
    ) -> None:
        """`times`: the usual latency takes so many times as long."""
        super().__init__(shared, actor=actor, seed=seed, plan=plan, page=page)
        if times != 1.0:
            self._latency = lambda verb, size, rng: times * usual_latency(verb, size, rng)
        self.dead = False
        self.freeze_at: int | None = None
        self.freeze_s = 0.0
        self.stalls, self.stall_s = 0.0, 1.0
        self.stalls_before: tuple[str, str] | None = None
        self.cut_off = False
        self.killed_sending: tuple[str, str, int] | None = None
        self._sent = 0
        self._stalling = random.Random(f"stalls/{actor}/{seed}")
        self.on_freeze: Callable[[], None] | None = None
        self.inside: dict[int, Callable[[], Awaitable[None]]] = {}
        self._frozen_until_s = _NEVER
        self.locked_out_s: tuple[float, float] | None = None  # from when to when its credentials do not count

    def beside(self, shared: ObjectMap) -> ProcessStore:
        """The same process's way to another lake: killed, frozen and locked out together."""
        return _Beside(self, shared)

    async def _attempt(
        self, verb: str, keys: tuple[str, ...], effect: Callable[[], str], size: int, crc: int
    ) -> tuple[Told, str]:
        if self.stalls_before is not None and verb == self.stalls_before[0] and self.stalls_before[1] in keys[0]:
            self._maybe_stall()
        if self._locked_out():
            await self._pause(_LOCKED_OUT_S)
            time_us = round(trio.current_time() * 1e6)
            self.shared.note(Event(time_us, self._actor, verb, keys, "not applied", "credentials expired"))
            raise StoreUnreachableError(f"{self.url}: the credentials have expired; renew them")
        if self.killed_sending is not None:
            kind, part, nth = self.killed_sending
            self._sent += verb == kind and part in keys[0]
            if self._sent == nth:
                self.kill_at = self.pauses + 1
        return await super()._attempt(verb, keys, effect, size, crc)

    def _maybe_stall(self) -> None:
        if not self.stalls or self._stalling.random() >= self.stalls:
            return
        if self.cut_off:
            self.locked_out_s = trio.current_time(), trio.current_time() + self.stall_s
        else:
            self._frozen_until_s = max(self._frozen_until_s, trio.current_time() + self.stall_s)

    def _locked_out(self) -> bool:
        if self.locked_out_s is None:
            return False
        start_s, end_s = self.locked_out_s
        return start_s <= trio.current_time() < end_s

    async def _pause(self, seconds: float) -> None:
        if self.dead:
            raise StoreUnreachableError(f"{self.url}: this process was killed")
        if self.pauses + 1 == self.freeze_at:
            self._frozen_until_s = trio.current_time() + self.freeze_s
            if self.on_freeze is not None:
                self.on_freeze()
        if self.stalls_before is None:
            self._maybe_stall()
        meanwhile = self.inside.pop(self.pauses + 1, None)
        if meanwhile is not None:
            await meanwhile()
        self.pauses += 1
        if self.pauses == self.kill_at:
            self.kill()
        await pause(seconds)
        if self._frozen_until_s != _NEVER and trio.current_time() < self._frozen_until_s:
            await trio.sleep_until(self._frozen_until_s)


class _Beside(ProcessStore):
    """A second store of a process, with its faults, whose pauses are those of the first."""

    def __init__(self, first: ProcessStore, shared: ObjectMap) -> None:
        super().__init__(shared, actor=f"{first._actor}'s other lake", plan=first.plan, page=first._page)
        self._first = first
        self._rng = first._rng

    def _locked_out(self) -> bool:
        return self._first._locked_out()

    async def _pause(self, seconds: float) -> None:
        await self._first._pause(seconds)
