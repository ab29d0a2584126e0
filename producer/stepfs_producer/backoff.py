"""Retries against a store that does not answer: back off, log once, finally give up.

An outage of minutes must not cost a fleet of producers its in-memory pipelines, so nothing fails before the limit; the
byte budget holds appends back meanwhile. Giving up is safe at any time: a restart reads the committed state.

An outage meets every upload that is under way, so only the first task of a producer that fails says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar
from weakref import WeakSet

import trio

from stepfs._internal import entropy
from stepfs.errors import StoreSilentError, StoreUnreachableError

_log = logging.getLogger("stepfs.producer")

_T = TypeVar("_T")

PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 10.0


class Outage:
    """The tasks of one producer, or run, that fail now. One that was cancelled while it failed leaves by itself."""

    def __init__(self) -> None:
        self._failing: WeakSet[Backoff] = WeakSet()
        self.failed_s = float("-inf")  # when the store gave no answer last

    @property
    def goes_on(self) -> bool:
        return bool(self._failing)

    def join(self, task: Backoff) -> bool:
        """Whether `task` is the first."""
        first = not self._failing
        self._failing.add(task)
        return first

    def leave(self, task: Backoff) -> bool:
        """Whether `task` was the last."""
        self._failing.discard(task)
        return not self._failing


class Backoff:
    """One task's requests to one store; it gives up after `limit_s` seconds of consecutive failures."""

    def __init__(self, what: str, limit_s: float, outage: Outage | None = None) -> None:
        """`outage`: shared by the tasks that one failing store stops together."""
        self._what = what
        self._limit_s = limit_s
        self.outage = outage or Outage()
        self._failing_since_s: float | None = None
        self._failures = 0

    async def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat `work` until it succeeds or the limit is reached."""
        while True:
            try:
                result = await work()
            except StoreUnreachableError as error:
                await self.failed(error)
            else:
                self.succeeded()
                return result

    async def failed(self, error: StoreUnreachableError) -> None:
        """Wait before the next try; raises `error` once the failures have lasted too long."""
        if isinstance(error, StoreSilentError):
            raise error  # `Silence` has already waited for its limit
        self.outage.failed_s = now_s = trio.current_time()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
            level = logging.WARNING if self.outage.join(self) else logging.DEBUG
            _log.log(level, "%s: %s; trying on for %.0f s", self._what, error, self._limit_s)
        if now_s - self._failing_since_s >= self._limit_s:
            raise error
        pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(self._failures, 10))
        self._failures += 1
        await trio.sleep(entropy.uniform(0.5, 1.0) * pause_s)

    def succeeded(self) -> None:
        """Note an answer of the store: failures count from zero again."""
        if self._failing_since_s is not None and self.outage.leave(self):
            _log.info("%s: the store answers again after %d failures", self._what, self._failures)
        self._failing_since_s = None
        self._failures = 0
