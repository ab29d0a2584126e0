"""Parts that run in a test's nursery, whose fixture ends them with the test."""

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
