"""What an engine of workers does: tasks, side by side, and bodies that stay with it.

A function whose result is *kept* returns a head by value and a body that stays with the engine; a reference stands for it
among the arguments of later tasks. A body may be lost: that is a result, not an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from stepfs.errors import RefusedError

T = TypeVar("T")
H = TypeVar("H")
NodeCheck = Callable[[], list[str]]  # on another machine: its lacks, each as the end of a sentence about it
ANSWER_S: Final = 1.5  # that an idle worker has to answer
_WORKERS_PER_SPARE: Final = 8  # a spare is warm: it takes over at once where a worker died or hangs


class UnfitNodesError(RefusedError):
    """Machines that should work lack something: a line for each. Install it, or take them out of the cluster."""

    several_lines: ClassVar[bool] = True


def spares_of(workers: int) -> int:
    """Workers beyond those, for tasks whose worker died or is late."""
    return -(-workers // _WORKERS_PER_SPARE)


class Reference(Protocol):
    """A body that the engine keeps until it is released. Each engine has a class of its own, compared by identity."""

    @property
    def nbytes(self) -> int: ...  # of the body in memory


@dataclass(frozen=True, slots=True)
class Kept(Generic[H]):
    """A result of which only the head returned."""

    head: H
    reference: Reference


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker ended before its task did. `with_machine`: its machine is lost, which is seldom the task's fault."""

    reason: str
    with_machine: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The task did not run, because these of its arguments are lost. There may be more of them."""

    references: tuple[Reference, ...]


class Engine(ABC):
    """Runs tasks side by side, in no promised order. The exceptions of a task are raised where it was submitted.

    Functions are found in the worker by their names. A `Reference` among the arguments of a task (not inside of one) is
    replaced by its body there. Cancelling a call ends its worker.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.died = 0  # workers, so far
        self.kept_bytes = 0  # of bodies, now

    @property
    def workers(self) -> int:
        """How many tasks should run at a time; `TaskRunner` keeps to it. May be set."""
        return self._workers

    @workers.setter
    def workers(self, count: int) -> None:
        self._workers = count
        self._fit()

    @property
    def spares(self) -> int:
        """Workers beyond those, for tasks whose worker died or is late."""
        return spares_of(self._workers)

    async def admit(self, look: NodeCheck) -> None:  # noqa: B027 - where there is no other machine, there is nothing to do
        """Begin, once `look` has found nothing missing on each other machine; else `UnfitNodesError` has a line for each.

        `StoreUnreachableError`: a store is away from a machine, now.
        """

    @abstractmethod
    async def up(self) -> None:
        """Return once a worker has come up, or has died at its start."""

    @abstractmethod
    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker, at once."""

    @abstractmethod
    async def keep(self, function: Callable[..., tuple[H, object]], *arguments: object) -> Kept[H] | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker, at once, and keep the second part of its result."""

    @abstractmethod
    def release(self, reference: Reference) -> None:
        """The body is not needed any more. To a task that is submitted with it all the same, it is lost."""

    @abstractmethod
    async def end_stalled(self) -> None:
        """Have idle workers answer, and end those that do not within `ANSWER_S`: one may stand still since its last task."""

    @abstractmethod
    def warm_spare(self) -> None:
        """Start a worker in place of one that was ended; it is up before it is needed."""

    @abstractmethod
    def _fit(self) -> None:
        """Start the workers that are missing, and end idle ones that are too many."""
