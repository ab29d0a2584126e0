"""Carrying out a task although workers die and stores are silent: the same task again, and its result is the same.

A worker that dies may have been killed, or may have been killed by its task: out of memory, a fault in a library. So a
task gets three workers. An error of the operating system or of a store is never a property of the data, so it is
waited out; any other error of a task ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs_producer.backoff import Backoff
from stepfs_producer.engine.api import Engine, WorkerDied
from stepfs_producer.sources.block import Records

T = TypeVar("T")
_log = logging.getLogger("stepfs.producer")

WORKERS_MAX: Final = 3  # that one task may cost


class WorkersDiedError(StepfsError):
    """A task killed every worker that it was given to."""


async def carry_out(
    engine: Engine, what: str, give_up_after_s: float, function: Callable[..., T], *arguments: object
) -> T:
    """The result of `function(*arguments)`. `what` names the task in messages.

    `WorkersDiedError` after three workers died of it; `StoreUnreachableError` when its store was silent too long.
    """
    backoff = Backoff(what, give_up_after_s)
    died = 0
    while True:
        try:
            result = await engine.submit(function, *arguments)
        except OSError as error:
            await backoff.failed(StoreUnreachableError(f"{what}: {error}"))
        except StoreUnreachableError as error:
            await backoff.failed(error)
        else:
            if not isinstance(result, WorkerDied):
                return result
            died += 1
            if died == WORKERS_MAX:
                raise WorkersDiedError(
                    f"{what}: {died} workers died of it in a row ({result.reason}). Is the memory too small, or does "
                    "a library fail on these records? Nothing was committed beyond the steps before it"
                )
            _log.info("%s: its worker died, another one takes over", what)


async def culprit(
    engine: Engine, records: Records, function: Callable[..., object], *arguments: object
) -> int | None:
    """The index of a record that kills a worker by itself, None if none does. `function(*arguments, records)` is the task.

    Halves are tried until one record is left. It costs one worker per halving: 17 for the largest group.
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
        return isinstance(await engine.submit(function, *arguments), WorkerDied)
    except (
        StepfsError,
        OSError,
    ):  # of another record; it would have ended the run already, had the worker lived
        return False
