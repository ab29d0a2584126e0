"""Reports a silent store after seconds to a user who waits at a terminal, and gives up after a minute."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from stepfs.errors import StoreSilentError

T = TypeVar("T")
Say = Callable[[str], None]
SAY_AFTER_S: Final = 5.0
GIVE_UP_AFTER_S: Final = 60.0  # and up to 20 s more for a create, which always reports its outcome
_NAP_S: Final = 0.001  # a clock may not move by a rounded difference


def unwatched() -> Silence:
    """A `Silence` of a store whose callers set deadlines of their own."""
    silence = Silence(lambda _: None)
    silence.end()
    return silence


class Silence:
    """Watches the requests of one store until `end`. `say` is called with the line for stderr, once per silence."""

    def __init__(
        self,
        say: Say,
        *,
        say_after_s: float | None = None,
        give_up_after_s: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._now_s = now_s
        self._say_after_s = SAY_AFTER_S if say_after_s is None else say_after_s
        self._give_up_after_s = GIVE_UP_AFTER_S if give_up_after_s is None else give_up_after_s
        self._ended = False
        self._waiting = 0
        self._reported = False
        self._last_sign_s = 0.0
        self._silent_s = 0.0  # when the last request ended

    @property
    def silent_s(self) -> float:
        """Seconds that requests have waited for a sign of life; 0.0 if none waits."""
        return self._now_s() - self._last_sign_s if self._waiting else 0.0

    def note_sign_of_life(self) -> None:
        self._last_sign_s = self._now_s()

    def set_limit(self, give_up_after_s: float) -> None:
        """Set the seconds of silence allowed from now on: a program that has begun loses more by giving up."""
        self._give_up_after_s = give_up_after_s

    def end(self) -> None:
        """Stop watching, because no user waits any more: requests, also those under way, may take their time."""
        self._ended = True

    async def watch(
        self, url: str, request: Callable[[], Awaitable[T]], advice: str = "check the network, then retry"
    ) -> T:
        """The result of `request`; `StoreSilentError` with `advice` once the store has been silent for too long.

        A request that shields itself from cancellation is awaited, and its result counts.
        """
        if self._ended:
            return await request()
        if not self._waiting:
            self._last_sign_s = self._now_s() - self._silent_s
        self._waiting += 1
        results: list[T] = []
        failures: list[Exception] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report_silence, url, nursery.cancel_scope)
                try:
                    results.append(await request())
                    self.note_sign_of_life()
                except Exception as error:  # noqa: BLE001 - raised below: a nursery would wrap it
                    failures.append(error)
                nursery.cancel_scope.cancel()
        finally:
            self._waiting -= 1
            self._silent_s = self._now_s() - self._last_sign_s
        for failure in failures:
            raise failure
        if not results:
            raise StoreSilentError(f"{url}: no answer for {self._give_up_after_s:g} s; {advice}")
        return results[0]

    async def _report_silence(self, url: str, scope: trio.CancelScope) -> None:
        while not self._ended:
            silent_s = self._now_s() - self._last_sign_s
            if silent_s < self._say_after_s:
                self._reported = False
                await trio.sleep(max(_NAP_S, self._say_after_s - silent_s))
            elif not self._reported:
                self._reported = True
                self._say(f"waiting for {url}: no answer yet; gives up after {self._give_up_after_s:g} s")
                # Wait the full time, also if this task runs late (a stopped process): an answer may be ready.
                await trio.sleep(self._give_up_after_s - self._say_after_s)
            elif silent_s < self._give_up_after_s:
                await trio.sleep(max(_NAP_S, self._give_up_after_s - silent_s))
            else:
                scope.cancel()
                return
