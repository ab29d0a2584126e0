"""The face of an engine: submit a plain function, get its result, or learn that its worker died.

A large result need not return. A function whose result is *kept* returns a head and a body: the head returns by value,
the body stays with the engine, and a reference to it stands for it among the arguments of later tasks. The command owns
all references. A body may be lost (a node is gone, its memory was needed): that is a result, not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
H = TypeVar("H")


class Reference(Protocol):
    """A body that the engine keeps until it is released. Each engine has a class of its own, compared by identity."""

    @property
    def nbytes(self) -> int:
        """Of the body in memory."""
        ...


@dataclass(frozen=True, slots=True)
class Kept(Generic[H]):
    """A result of which only the head returned."""

    head: H
    reference: Reference


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker ended before its task did; the same task may be given to another one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The task did not run, because these of its arguments are lost. There may be more of them."""

    references: tuple[Reference, ...]


class Engine(Protocol):
    """Runs what is submitted side by side, in no promised order. A task's exceptions are raised where it was submitted.

    Functions are found in the worker by their names. A `Reference` among the arguments of a task (not inside of one) is
    replaced by its body there. Cancelling a call ends its worker.
    """

    @property
    def workers(self) -> int:
        """How many tasks should run at a time; `failover` keeps to it."""
        ...

    @property
    def spares(self) -> int:
        """Workers beyond those, for tasks whose worker died or is late."""
        ...

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker, at once."""
        ...

    async def keep(
        self, function: Callable[..., tuple[H, object]], *arguments: object
    ) -> Kept[H] | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker, at once, and keep the second part of what it returns."""
        ...

    def release(self, reference: Reference) -> None:
        """The body is not needed any more. To a task that is submitted with it all the same, it is lost."""
        ...

    def warm_spare(self) -> None:
        """Start a worker in place of one that was ended; it is up before it is needed."""
        ...
