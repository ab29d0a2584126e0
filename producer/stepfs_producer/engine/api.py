"""The face of an engine: submit a plain function, get its result, or learn that its worker died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeVar

from stepfs.errors import RefusedError, StepfsError

T = TypeVar("T")
Look = Callable[[], list[str]]  # carried out on another machine: what it lacks, in words that follow its name

_WORKERS_PER_SPARE: Final = 8  # a spare is warm: it takes over at once where a worker died or hangs


class ClusterUnreachableError(StepfsError):
    """The machines that should work do not answer. Start them, or name others."""

    exit_code = 6


class UnfitNodesError(RefusedError):
    """Machines that should work lack something: a line for each. Install it, or take them out of the cluster."""

    several_lines: ClassVar[bool] = True


def spares_of(workers: int) -> int:
    """Workers beyond those, for tasks whose worker died or is late."""
    return -(-workers // _WORKERS_PER_SPARE)


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker ended before its task did; the same task may be given to another one."""

    reason: str


class Engine(Protocol):
    """Runs what is submitted side by side, in no promised order. A task's exceptions are raised where it was submitted."""

    @property
    def workers(self) -> int:
        """How many tasks should run at a time; `failover` keeps to it. May be set: missing workers start, idle ones end."""
        ...

    @workers.setter
    def workers(self, count: int) -> None: ...

    @property
    def died(self) -> int:
        """Workers, so far."""
        ...

    async def admit(self, look: Look) -> None:
        """Begin, once `look` has found nothing missing on each other machine; else `UnfitNodesError`."""
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
