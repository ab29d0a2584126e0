"""An engine whose workers are threads of this process: runs of the command line that are about messages and bytes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from stepfs.errors import UsageError
from stepfs_producer.engine.api import Engine, Kept
from stepfs_producer.engine.shared_memory import BodyArgument
from stepfs_producer.engine.worker import carried_out


class Body:
    """What a kept task made, in the parts in which Ray's store would keep it."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts
        self.nbytes = sum(part.nbytes for part in parts)


class ThreadEngine(Engine):
    """No worker dies. Arguments and results are pickled as between processes."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.idle = workers
        self._limiter = trio.CapacityLimiter(workers)

    async def up(self) -> None:
        await trio.lowlevel.checkpoint()

    async def submit(self, function: Callable[..., Any], *arguments: object) -> Any:
        result, _ = await self._run(function, arguments, keep=False)
        return result

    async def keep(self, function: Callable[..., Any], *arguments: object) -> Any:
        (head, _), parts = await self._run(function, arguments, keep=True)
        body = Body([memoryview(bytes(part)) for part in parts])
        self.kept_bytes += body.nbytes
        return Kept(head, body)

    def release(self, reference: Any) -> None:
        self.kept_bytes -= reference.nbytes

    async def _run(
        self, function: Callable[..., Any], arguments: tuple[object, ...], *, keep: bool
    ) -> tuple[Any, list[memoryview]]:
        bodies = [one.parts for one in arguments if isinstance(one, Body)]
        numbers = iter(range(len(bodies)))
        given = [BodyArgument(next(numbers)) if isinstance(one, Body) else one for one in arguments]
        call = partial(carried_out, pickle.dumps((function, given)), bodies, keep=keep)
        answer, parts = await trio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)
        done, result = pickle.loads(answer)
        if not done:
            raise result
        return result, parts

    async def end_stalled(self) -> None:
        await trio.lowlevel.checkpoint()

    def warm_spare(self) -> None:
        pass

    def _fit(self) -> None:
        self._limiter.total_tokens = self.workers


@asynccontextmanager
async def thread_engine(workers: int, *, preload: Callable[[], object]) -> AsyncIterator[ThreadEngine]:
    """In place of `local_engine`. What the plan's directory adds to the modules of this process goes with it."""
    if workers < 1:
        raise UsageError(f"--workers {workers}: use at least 1")
    path, modules = list(sys.path), set(sys.modules)
    preload()
    try:
        yield ThreadEngine(workers)
    finally:
        added = [place for place in sys.path if place not in path]
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(added)) and added:
                del sys.modules[name]


def use_threads(patch: pytest.MonkeyPatch) -> None:
    """Local workers of runs in this process are threads until the patch ends."""
    patch.setattr("stepfs_producer.run.machines.local_engine", thread_engine)
    patch.setattr("stepfs_producer.run.pipeline.local_engine", thread_engine)
