"""One back-off for all GETs of a mount: a store in trouble gets fewer requests, not one schedule per reader.

Failures of requests that were under way together count once, or sixteen time-outs in one second would be read as
sixteen rounds of failure. A success halves the interval, so that recovery is as quick as the store's.
"""

from __future__ import annotations

from typing import Final

import trio

_INTERVAL_FIRST_S: Final = 0.1
_INTERVAL_MAX_S: Final = 5.0


class Throttle:
    """At most one request starts per `interval_s`; 0 while the store is well."""

    def __init__(self) -> None:
        self.interval_s = 0.0
        self._next_at = 0.0
        self._round = 0
        self._changed = trio.Event()

    async def turn(self) -> int:
        """Wait until a request may start; returns the token to report its outcome with."""
        while (wait := self._next_at - trio.current_time()) > 0:
            with trio.move_on_after(wait):
                await self._changed.wait()
        self._next_at = trio.current_time() + self.interval_s
        return self._round

    def failed(self, token: int) -> None:
        """The request could not reach the store."""
        if token == self._round:
            self._round += 1
            self.interval_s = min(max(self.interval_s * 2, _INTERVAL_FIRST_S), _INTERVAL_MAX_S)
            self._next_at = trio.current_time() + self.interval_s

    def succeeded(self) -> None:
        if self.interval_s:
            self.interval_s = self.interval_s / 2 if self.interval_s > _INTERVAL_FIRST_S else 0.0
            self._next_at = min(self._next_at, trio.current_time() + self.interval_s)
            self._changed.set()
            self._changed = trio.Event()
