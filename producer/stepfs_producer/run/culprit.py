"""Which record of a group kills the workers that transform it: halves are tried until one record is left."""

from __future__ import annotations

from collections.abc import Callable

from stepfs.errors import StepfsError
from stepfs_producer.engine.api import Died, Engine
from stepfs_producer.sources.block import Records


async def culprit(
    engine: Engine, records: Records, function: Callable[..., object], *arguments: object
) -> int | None:
    """The index of a record that kills a worker by itself, None if none does. `function(*arguments, records)` is the task.

    It costs one worker per halving: 17 for the largest group.
    """
    first, last = 0, len(records)
    while last - first > 1:
        middle = (first + last) // 2
        if await _kills(engine, function, *arguments, records.part(first, middle)):
            last = middle
        else:
            first = middle
    return first if await _kills(engine, function, *arguments, records.part(first, last)) else None


async def _kills(engine: Engine, function: Callable[..., object], *arguments: object) -> bool:
    try:
        return isinstance(await engine.submit(function, *arguments), Died)
    except (StepfsError, OSError):  # of another record; it would have been told already, had the worker lived
        return False
