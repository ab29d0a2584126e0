"""The face of an engine: submit a plain function, get its result, or learn that its worker died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker ended before its task did; the same task may be given to another one."""

    reason: str


class Engine(Protocol):
    """Runs what is submitted side by side, in no promised order. A task's exceptions are raised where it was submitted."""

    @property
    def workers(self) -> int:
        """How many tasks should run at a time; `failover` keeps to it."""
        ...

    @property
    def spares(self) -> int:
        """Workers beyond those, for tasks whose worker died or is late."""
        ...

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied:
        """Run `function(*arguments)` in a worker, at once. The function is found there by its name. Cancelling it ends the
        worker.
        """
        ...

    def warm_spare(self) -> None:
        """Start a worker in place of one that was ended; it is up before it is needed."""
        ...
