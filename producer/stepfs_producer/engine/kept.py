"""A body in the command's terms: held by those that need it, and made again when it is needed and not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

import trio

from stepfs_producer.engine.api import Reference


class KeptBody:
    """The body of a kept task. Its first holder is the caller that got it; without a holder it is released.

    Where it is lost, or was released and is held again, `make_again` repeats its task, once for all that wait.
    """

    def __init__(
        self,
        reference: Reference,
        again: Callable[[], Awaitable[Reference]],
        release: Callable[[Reference], None],
    ) -> None:
        self.nbytes = reference.nbytes
        self._reference: Reference | None = reference
        self._again = again
        self._release = release
        self._holders = 1
        self._making = trio.Lock()

    @property
    def here(self) -> bool:
        return self._reference is not None

    @property
    def reference(self) -> Reference:
        """For a task, while it is `here` and held."""
        assert self._reference is not None
        return self._reference

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        assert self._holders >= 0
        if not self._holders and self._reference is not None:
            self._release(self._reference)
            self._reference = None

    @contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def note_lost(self, references: Collection[Reference]) -> bool:
        """Whether it is one of these, and lost; another task may have noted it before, and have made it again."""
        if self._reference is None or not any(one is self._reference for one in references):
            return False
        self._release(self._reference)
        self._reference = None
        return True

    async def make_again(self) -> None:
        """Return once it is there. The caller holds it."""
        async with self._making:
            if self._reference is None:
                self._reference = await self._again()
