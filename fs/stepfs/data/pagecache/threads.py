"""The threads in which a daemon accesses its own mount: their calls wait for this very daemon.

So never the event loop's thread, and never a pool that others need. The mount knows them by their numbers, and neither
learns from their opens nor pins for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import trio

_log = logging.getLogger("stepfs.data")
_THREADS: Final = 2
_FAILURES_MAX: Final = 3  # in a row: this kernel, or this kind of mount, cannot be primed

T = TypeVar("T")


class MountThreads:
    """A small pool of them."""

    def __init__(self) -> None:
        self.working = True
        self._failures = 0
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._numbers: set[int] = set()

    def has(self, number: int) -> bool:
        """Whether a thread, by the kernel's number, is one of these and at work."""
        return number in self._numbers

    async def call(self, work: Callable[[], T]) -> T | None:
        """Run in one of them; None if the step is gone or the kernel refuses, which ends `working` in time."""

        def own() -> T:
            number = threading.get_native_id()
            self._numbers.add(number)
            try:
                return work()
            finally:
                self._numbers.discard(number)

        try:
            done = await trio.to_thread.run_sync(own, limiter=self._limiter)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failures += 1
            if self._failures >= _FAILURES_MAX:
                self.working = False
                _log.info("the page cache of this mount cannot be primed (%s); reading goes on without", error)
            return None
        self._failures = 0
        return done
