"""Parts that run in a test's nursery, whose fixture ends them with the test; and waiting for what has no event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import trio


class _Runs(Protocol):
    @property
    def run(self) -> Callable[..., Awaitable[object]]: ...


Part = TypeVar("Part", bound=_Runs)


async def at_work(nursery: trio.Nursery, part: Part) -> Part:
    """The part, started."""
    await nursery.start(part.run)
    return part


async def until(condition: Callable[[], object], *, seconds: float = 60, pause_s: float = 0.001) -> None:
    """Look until it is so: of a worker thread, a server or a file system, which have no event to wait for."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(pause_s)
