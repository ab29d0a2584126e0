"""Worker processes of this machine, by trio-parallel: a killed worker costs its own task, and nothing else."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import trio
import trio_parallel

from stepfs.errors import UsageError
from stepfs_producer.engine.api import Look, WorkerDied, spares_of
from stepfs_producer.engine.worker import begin

T = TypeVar("T")
_log = logging.getLogger("stepfs.producer")

_ENDING_S: Final = 5.0  # that idle workers have to end


class LocalEngine:
    """Tasks in processes of their own."""

    def __init__(
        self,
        context: trio_parallel.WorkerContext,
        workers: int,
        nursery: trio.Nursery,
        preload: Callable[[], object],
    ) -> None:
        self._context = context
        self._preload = preload
        self._limiter = trio.CapacityLimiter(math.inf)
        self._nursery = nursery
        self._workers = workers
        self.died = 0  # workers, so far

    @property
    def workers(self) -> int:
        return self._workers

    @workers.setter
    def workers(self, count: int) -> None:
        self._workers = count
        found = self._context.statistics()
        missing = count + self.spares - found.idle_workers - found.running_workers
        for _ in range(missing + found.idle_workers if missing > 0 else 0):  # see `warm_spare`
            self._nursery.start_soon(self._warm_one)
        for _ in range(min(-missing, found.idle_workers)):
            self._nursery.start_soon(self._end_one)

    @property
    def spares(self) -> int:
        return spares_of(self._workers)

    @property
    def idle(self) -> int:
        """Workers that are up and wait for a task."""
        count: int = self._context.statistics().idle_workers
        return count

    async def admit(self, look: Look) -> None:
        """There is no other machine."""

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied:
        """Run `function(*arguments)` in a worker; cancelling it kills the worker."""
        call = partial(function, *arguments)
        try:
            result: T = await self._context.run_sync(call, kill_on_cancel=True, limiter=self._limiter)
        except trio_parallel.BrokenWorkerError as error:
            self.died += 1
            self.warm_spare()
            return WorkerDied(_how_it_ended(error))
        return result

    async def warm(self) -> None:
        """Start all workers and the spares, side by side."""
        async with trio.open_nursery() as nursery:
            for _ in range(self.workers + self.spares):
                nursery.start_soon(self._warm_one)

    def warm_spare(self) -> None:
        """Start a worker in place of one that was ended. Idle ones get the task first, so there is one for each of them."""
        for _ in range(self.idle + 1):
            self._nursery.start_soon(self._warm_one)

    async def _warm_one(self) -> None:
        try:
            await self._context.run_sync(self._preload, kill_on_cancel=True, limiter=self._limiter)
        except trio_parallel.BrokenWorkerError as error:
            _log.info("a new worker died before it had a task: %s", error)

    async def _end_one(self) -> None:
        with suppress(trio_parallel.BrokenWorkerError):
            await self._context.run_sync(os._exit, 0, kill_on_cancel=True, limiter=self._limiter)


@asynccontextmanager
async def local_engine(
    workers: int, *, preload: Callable[[], object] = os.getpid
) -> AsyncIterator[LocalEngine]:
    """An engine of `workers` processes and their spares; leaving ends them all.

    `preload` runs in each new worker before its first task, to import the modules of tasks.
    """
    if workers < 1:
        raise UsageError(f"--workers {workers}: use at least 1")
    failure: BaseException | None = None
    try:
        async with (
            trio_parallel.open_worker_context(
                idle_timeout=math.inf, init=partial(begin, os.getpid()), grace_period=_ENDING_S
            ) as context,
            trio.open_nursery() as nursery,
        ):
            engine = LocalEngine(context, workers, nursery, preload)
            nursery.start_soon(engine.warm)
            try:
                yield engine
            except BaseException as error:
                failure = error
                raise
            finally:
                nursery.cancel_scope.cancel()
    except trio_parallel.BrokenWorkerError as error:
        # An idle worker had died; ending all workers raises this in place of the error that ended the run.
        _log.debug("an idle worker had been killed: %s", error)
        if failure is not None:
            raise failure from None


def _how_it_ended(error: trio_parallel.BrokenWorkerError) -> str:
    processes = [
        one for one in (*error.args, *getattr(error.__cause__, "args", ())) if hasattr(one, "exitcode")
    ]
    code = processes[0].exitcode if processes else None
    if code is None:
        return "it ended"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
