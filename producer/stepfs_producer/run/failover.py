"""Carrying out a task although workers die and stores are silent: the same task again, and its result is the same.

A worker that dies may have been killed, or may have been killed by its task: out of memory, a fault in a library. So a
task gets three workers. An error of the operating system or of a store is never a property of the data, so it is
waited out; whatever else a task raises is, and ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs_producer.backoff import Backoff
from stepfs_producer.engine.api import Died, Engine

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
            if not isinstance(result, Died):
                return result
            died += 1
            if died == WORKERS_MAX:
                raise WorkersDiedError(
                    f"{what}: {died} workers died of it in a row ({result.reason}). Is the memory too small, or does "
                    "a library fail on these records? Nothing was committed beyond the steps before it"
                )
            _log.info("%s: its worker died, another one takes over", what)
