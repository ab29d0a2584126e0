"""Many objects: listed page by page, and the same work on each, a bounded number at once and the results in order."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Final, TypeVar

import trio

from stepfs.errors import StepfsError
from stepfs.store.api import Entry, Store

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE: Final = 16
_BYTES_AT_ONCE: Final = 64 << 20
_PAGE: Final = 1000


def at_once(bytes_each: int) -> int:
    """How many objects of that size may be in memory together, at least one."""
    return max(1, min(AT_ONCE, _BYTES_AT_ONCE // max(bytes_each, 1)))


async def pages(store: Store, prefix: str, after: str = "") -> AsyncGenerator[list[Entry], None]:
    """The objects under `prefix` behind the key `after`, a LIST at a time."""
    while page := await store.list(prefix, after=after, limit=_PAGE):
        yield page
        if len(page) < _PAGE:
            return
        after = page[-1].key


async def together(*works: Callable[[], Awaitable[R]]) -> list[R]:
    """What each returns, all done at once. The first error in this order is raised when all have ended."""
    async with aclosing(in_order(works, lambda work: work(), number=len(works))) as done:
        return [result async for _, result in done]


async def in_order(
    items: Iterable[T], work: Callable[[T], Awaitable[R]], *, number: int = AT_ONCE
) -> AsyncGenerator[tuple[T, R], None]:
    """(item, result) of each, `number` at once. The first error of `work` in this order is raised in its turn."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, number)):
        results: dict[int, R] = {}
        errors: dict[int, StepfsError] = {}

        async def run(
            place: int, item: T, results: dict[int, R] = results, errors: dict[int, StepfsError] = errors
        ) -> None:
            try:
                results[place] = await work(item)
            except StepfsError as error:  # raised below: a nursery would wrap it into a group
                errors[place] = error

        async with trio.open_nursery() as nursery:
            for place, item in enumerate(batch):
                nursery.start_soon(run, place, item)
        for place, item in enumerate(batch):
            if place in errors:
                raise errors[place]
            yield item, results.pop(place)
