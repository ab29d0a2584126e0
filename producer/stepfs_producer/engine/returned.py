"""Kept bodies of workers that share no memory with the command: they come back to it, and go out with each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from stepfs_producer.engine.api import Kept, Lost
from stepfs_producer.engine.bodies import Stored

H = TypeVar("H")


class ReturnedBody:
    """A body that the command has until it is released."""

    def __init__(self, stored: Stored) -> None:
        self.stored: Stored | None = stored
        self.nbytes = len(stored.inline or b"")


class ReturnedBodies:
    """The bodies of an engine."""

    def __init__(self) -> None:
        self.nbytes = 0  # of those that are here

    def keep(self, head: H, stored: Stored) -> Kept[H]:
        """What a task returned, of which the second part is not looked at."""
        reference = ReturnedBody(stored)
        self.nbytes += reference.nbytes
        return Kept(head, reference)

    def release(self, reference: object) -> None:
        """Let the body go."""
        assert isinstance(reference, ReturnedBody)
        if reference.stored is not None:
            reference.stored = None
            self.nbytes -= reference.nbytes

    def resolved(self, arguments: Sequence[object]) -> tuple[object, ...] | Lost:
        """The arguments for a worker, or those that are not here."""
        bodies = [one for one in arguments if isinstance(one, ReturnedBody)]
        if lost := tuple(body for body in bodies if body.stored is None):
            return Lost(lost)
        return tuple(one.stored if isinstance(one, ReturnedBody) else one for one in arguments)
