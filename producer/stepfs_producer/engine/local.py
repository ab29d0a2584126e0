"""Worker processes of this machine, by trio-parallel: a killed worker costs its own task, and nothing else."""

from __future__ import annotations

import itertools
import logging
import math
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import trio
import trio_parallel

from stepfs.errors import UsageError
from stepfs_producer.engine.api import ANSWER_S, Engine, Kept, Lost, Reference, WorkerDied
from stepfs_producer.engine.shared_memory import BodyFile, LostBodies, StoredBody, run_task
from stepfs_producer.engine.worker import begin

T = TypeVar("T")
H = TypeVar("H")
_log = logging.getLogger("stepfs.producer")

_ENDING_S: Final = 5.0  # that idle workers have to end
_FILES_MAX: Final = 1 << 16  # that the command may have open; half of them are bodies


class LocalReference:
    """A stored body. `descriptor`: of its file, which the command has open."""

    def __init__(self, stored: StoredBody, descriptor: int | None) -> None:
        self.stored = stored
        self.descriptor = descriptor
        self.nbytes = sum(stored.sizes) if stored.inline is None else len(stored.inline)


class LocalEngine(Engine):
    """Tasks in processes of their own."""

    def __init__(
        self,
        context: trio_parallel.WorkerContext,
        workers: int,
        nursery: trio.Nursery,
        preload: Callable[[], object],
    ) -> None:
        super().__init__(workers)
        self._context = context
        self._preload = preload
        self._nursery = nursery
        # A task that finds no idle worker starts one, so the limit is one of processes: those that come up slowly have a task.
        self._limiter = trio.CapacityLimiter(workers + self.spares)
        self._up = trio.Event()
        self._bodies: dict[LocalReference, None] = {}
        self._keeping = 0  # tasks under way whose bodies are kept
        self._numbers = itertools.count()
        self._files_max = _file_limit() // 2

    def _fit(self) -> None:
        self._limiter.total_tokens = self.workers + self.spares
        found = self._context.statistics()
        missing = self.workers + self.spares - found.idle_workers - found.running_workers
        for _ in range(missing + found.idle_workers if missing > 0 else 0):  # see `warm_spare`
            self._nursery.start_soon(self._warm_one)
        for _ in range(min(-missing, found.idle_workers)):
            self._nursery.start_soon(self._end_one)

    @property
    def idle(self) -> int:
        """Workers that are up and wait for a task."""
        count: int = self._context.statistics().idle_workers
        return count

    async def up(self) -> None:
        await self._up.wait()

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied | Lost:
        result: T | WorkerDied | Lost = await self._run(function, arguments, None, keep=False)
        return result

    async def keep(self, function: Callable[..., tuple[H, object]], *arguments: object) -> Kept[H] | WorkerDied | Lost:
        name = f"stepfs-{os.getpid()}-{next(self._numbers)}"
        descriptor = None
        if len(self._bodies) + self._keeping < self._files_max:  # else bodies return
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        file = None if descriptor is None else BodyFile(f"/proc/{os.getpid()}/fd/{descriptor}", name)
        self._keeping += 1
        used = False
        try:
            result = await self._run(function, arguments, file, keep=True)
            if isinstance(result, WorkerDied | Lost):
                return result
            head, stored = result
            used = stored.file is not None
            reference = LocalReference(stored, descriptor if used else None)
            self._bodies[reference] = None
            self.kept_bytes += reference.nbytes
            return Kept(head, reference)
        finally:
            self._keeping -= 1
            if descriptor is not None and not used:
                os.close(descriptor)

    def release(self, reference: Reference) -> None:
        assert isinstance(reference, LocalReference)
        if reference not in self._bodies:
            return
        del self._bodies[reference]
        self.kept_bytes -= reference.nbytes
        if reference.descriptor is not None:
            os.close(reference.descriptor)

    def release_all(self) -> None:
        for reference in list(self._bodies):
            self.release(reference)

    async def _run(
        self,
        function: Callable[..., Any],
        arguments: tuple[object, ...],
        keep_in: BodyFile | None,
        *,
        keep: bool,
    ) -> Any:
        references = [argument for argument in arguments if isinstance(argument, LocalReference)]
        if lost := tuple(reference for reference in references if reference not in self._bodies):
            return Lost(lost)
        stored = tuple(one.stored if isinstance(one, LocalReference) else one for one in arguments)
        call = partial(run_task, function, stored, keep_in, keep=keep)
        try:
            result = await self._context.run_sync(call, kill_on_cancel=True, limiter=self._limiter)
        except trio_parallel.BrokenWorkerError as error:
            self.died += 1
            self.warm_spare()
            return WorkerDied(_how_it_ended(error))
        if isinstance(result, LostBodies):
            return Lost(tuple(one for index in result.indices if isinstance(one := arguments[index], LocalReference)))
        return result

    async def warm(self) -> None:
        async with trio.open_nursery() as nursery:
            # A single worker has no warm spare: a start costs more than what is late in a small run.
            for _ in range(self.workers + self.spares if self.workers > 1 else 1):
                nursery.start_soon(self._warm_one)

    def warm_spare(self) -> None:
        for _ in range(self.idle + 1):  # idle ones get the task first
            self._nursery.start_soon(self._warm_one)

    async def _warm_one(self) -> None:
        try:
            await self._context.run_sync(self._preload, kill_on_cancel=True, limiter=self._limiter)
        except trio_parallel.BrokenWorkerError as error:
            _log.info("a new worker died before it had a task: %s", error)
        self._up.set()  # a task that finds none starts one

    async def end_stalled(self) -> None:
        async def ask() -> None:
            with trio.move_on_after(ANSWER_S) as patience, suppress(trio_parallel.BrokenWorkerError):
                await self._context.run_sync(os.getpid, kill_on_cancel=True, limiter=self._limiter)
            if patience.cancelled_caught:
                self.warm_spare()

        async with trio.open_nursery() as nursery:
            for _ in range(self.idle):
                nursery.start_soon(ask)

    async def _end_one(self) -> None:
        with suppress(trio_parallel.BrokenWorkerError):
            await self._context.run_sync(os._exit, 0, kill_on_cancel=True, limiter=self._limiter)


@asynccontextmanager
async def local_engine(workers: int, *, preload: Callable[[], object] = os.getpid) -> AsyncIterator[LocalEngine]:
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
                engine.release_all()
    except trio_parallel.BrokenWorkerError as error:
        # An idle worker had died; ending all workers raises this in place of the error that ended the run.
        _log.debug("an idle worker had been killed: %s", error)
        if failure is not None:
            raise failure from None


def _file_limit() -> int:
    """Descriptors that this process may have, as many as its hard limit allows from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, _FILES_MAX)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted, soft)


def _how_it_ended(error: trio_parallel.BrokenWorkerError) -> str:
    processes = [one for one in (*error.args, *getattr(error.__cause__, "args", ())) if hasattr(one, "exitcode")]
    code = processes[0].exitcode if processes else None
    if code is None:
        return "it ended"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
