"""Who waits for a change of the log, and who brings it: each wakes the other."""

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class Changes:
    """Wakes all listeners at a change; a new listener wakes the follower."""

    def __init__(self) -> None:
        self.next_change = trio.Event()  # take it before looking at the view, then wait
        self._hurry = trio.Event()
        self.listeners = 0

    def notify(self) -> None:
        self.next_change.set()
        self.next_change = trio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.listeners += 1
        self._hurry.set()
        try:
            yield
        finally:
            self.listeners -= 1

    async def wait_for_listener(self) -> None:
        self._hurry = trio.Event()
        await self._hurry.wait()
