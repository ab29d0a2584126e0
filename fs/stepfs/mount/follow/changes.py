"""The bell that rings when the view has changed, and who is listening for it.

One event per generation, replaced when it rings: a waiter that took the event before it looked at the view cannot
miss a change. The number of listeners tells the follower to look more often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class News:
    """Rings for everybody who listens; and lets listeners hurry the follower."""

    def __init__(self) -> None:
        self._changed = trio.Event()
        self._hurry = trio.Event()
        self.listeners = 0

    @property
    def next_change(self) -> trio.Event:
        """Set at the next change. Take it before looking at the view, then wait."""
        return self._changed

    def notify(self) -> None:
        """The view has changed."""
        self._changed.set()
        self._changed = trio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count as somebody who waits."""
        self.listeners += 1
        self._hurry.set()
        try:
            yield
        finally:
            self.listeners -= 1

    async def wait_for_listener(self) -> None:
        """Return as soon as a new listener comes."""
        self._hurry = trio.Event()
        await self._hurry.wait()
