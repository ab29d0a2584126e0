"""From step plans to committed steps: payloads are made side by side, appended in order, and paced.

At most `STEPS_PER_WORKER` steps per worker are under way, so a producer that has to wait (for trainers, for the store)
stops the planner, and the planner stops the loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import trio

from stepfs_producer.engine.failover import Tasks
from stepfs_producer.payloads.encode import construct
from stepfs_producer.payloads.step_task import PayloadSpec, cut_to
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run.measured.bottleneck import Cause, Waits
from stepfs_producer.run.sample_buffer import Group, task_of

STEPS_PER_WORKER: Final = 2


class StepSink(Protocol):
    """Where the steps of a run go: a lake's producer, or a comparison with the steps of a lake."""

    async def append(
        self, batch: Sequence[bytes], *, position: Mapping[str, object], records: Sequence[int]
    ) -> object: ...

    async def flush(self) -> object: ...


class _PendingStep:
    """A step between its plan and its append."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.done = trio.Event()
        self.payloads: list[bytes] = []
        self.records: list[int] = []


class StepBuilder:
    """The steps under way."""

    def __init__(
        self,
        tasks: Tasks,
        sink: StepSink | None,
        spec: PayloadSpec,
        *,
        waits: Waits,
        steps_per_second: float | None,
        ranks: Sequence[int] | None,
        appended: Callable[[StepPlan], None],
        workers_max: int,
    ) -> None:
        self._tasks = tasks
        self._sink = sink
        self._spec = spec
        self._ranks = ranks
        self._waits = waits
        self._interval_s = 0.0 if steps_per_second is None else 1 / steps_per_second
        self._appended = appended
        steps = STEPS_PER_WORKER * workers_max
        self._room = trio.Semaphore(steps)
        self._sender, self._receiver = trio.open_memory_channel[_PendingStep](steps)

    async def wait_for_room(self) -> None:
        """Wait until one more step may be made."""
        with self._waits.on(Cause.ROOM):
            await self._room.acquire()

    def start(self, plan: StepPlan, groups: Mapping[str, tuple[Group, ...]], nursery: trio.Nursery) -> None:
        """Make and append the step after those before it. `wait_for_room` was called."""
        if self._sink is None:
            self._room.release()
            self._appended(plan)
            return
        making = _PendingStep(plan)
        self._sender.send_nowait(making)
        nursery.start_soon(self._make, making, groups)

    def no_more(self) -> None:
        """`run` returns once all started steps are appended."""
        self._sender.close()

    async def run(self) -> None:
        """Append in order."""
        if self._sink is None:
            return
        due_s = trio.current_time()
        async for making in self._receiver:
            with self._waits.on(Cause.WORKERS):
                await making.done.wait()
            if self._interval_s:
                # A pace is a limit, and lost time is not made up for.
                with self._waits.on(Cause.PACE):
                    await trio.sleep_until(due_s)
                due_s = max(due_s, trio.current_time()) + self._interval_s
            plan = making.plan
            with self._waits.on(Cause.STORE):
                await self._sink.append(
                    making.payloads, position=plan.after.position(), records=making.records
                )
            self._room.release()
            self._appended(plan)

    async def _make(self, making: _PendingStep, groups: Mapping[str, tuple[Group, ...]]) -> None:
        task = await trio.to_thread.run_sync(task_of, making.plan, groups)
        if self._ranks is not None:
            task = cut_to(task, self._ranks)
        what = f"making step {making.plan.step}"
        making.payloads, making.records = await self._tasks.carry_out(what, "", construct, self._spec, task)
        making.done.set()
