"""From step plans to committed steps: made side by side, in the lake in the order of the plan, and paced.

A step gets its seq by a ticket, in the order of the plan. A worker then makes it and uploads it under the ticket, and only
its descriptor returns.

At most `STEPS_PER_WORKER` steps per worker are under way, fewer of many bytes. So a producer that waits (for trainers,
for the store) stops the planner, and the planner stops the loaders.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine.failover import PerAttempt, Tasks
from stepfs_producer.engine.kept import KeptBody
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.plan.step import SPAN_COLUMNS, StepPlan
from stepfs_producer.run.load import Group, spans_of
from stepfs_producer.run.measured import Cause, Waits
from stepfs_producer.run.memory import STEPS_PER_WORKER, StepRoom

PAYLOAD_BYTES_PER_TOKEN: Final = 24  # of .safetensors; the others have fewer


class PutStep(Protocol):
    """The answer of the worker that made a step."""

    @property
    def payload_bytes(self) -> int: ...


P = TypeVar("P", bound=PutStep)
P_contra = TypeVar("P_contra", bound=PutStep, contravariant=True)


class TicketProducer(Protocol[P_contra]):
    """An `AsyncProducer`, or the comparison of a replay."""

    async def reserve(
        self, *, position: Mapping[str, object], records: Sequence[int], payload_bytes: int
    ) -> Ticket: ...

    def renew(self, ticket: Ticket) -> Ticket: ...

    def settle(self, ticket: Ticket, descriptor: P_contra, /) -> None: ...

    async def flush(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepSink(Generic[P]):
    """Where the steps of a run go: a worker calls `put(spec, spans, destination, ticket, *bodies)`."""

    producer: TicketProducer[P]
    put: Callable[..., P]
    destination: object


class _PendingStep:
    """A step between its plan and its place in the lake."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.done = trio.Event()
        self.reserved = trio.Event()
        self.reserved_s = 0.0
        self.ticket: Ticket | None = None


class StepBuilder:
    """The steps under way."""

    def __init__(
        self,
        tasks: Tasks,
        sink: StepSink[Any] | None,
        spec: PayloadSpec,
        *,
        waits: Waits,
        steps_per_second: float | None,
        appended: Callable[[StepPlan], None],
        workers_max: int,
        rows_bytes_max: int | None,
    ) -> None:
        self._tasks = tasks
        self._sink = sink
        self._spec = spec
        self._waits = waits
        self._interval_s = 0.0 if steps_per_second is None else 1 / steps_per_second
        self._due_s = -math.inf
        self._unsettled: deque[_PendingStep] = deque()  # in order
        self._settled_s = -math.inf  # when the newest step got into its place
        self._payload_bytes = 0  # of the newest step that was uploaded
        self._appended = appended
        steps = STEPS_PER_WORKER * workers_max
        self._room = StepRoom(steps, rows_bytes_max)
        self._sender, self._receiver = trio.open_memory_channel[_PendingStep](steps)

    async def wait_for_room(self, plan: StepPlan) -> None:
        """Wait until this step may be made."""
        if self._sink is not None:
            with self._waits.on(Cause.ROOM):
                await self._room.take(self._row_bytes(plan))

    def start(self, plan: StepPlan, groups: Mapping[str, tuple[Group, ...]], nursery: trio.Nursery) -> None:
        """Make the next step, for which `wait_for_room` was called."""
        if self._sink is None:
            self._appended(plan)
            return
        making = _PendingStep(plan)
        self._sender.send_nowait(making)
        for body in _bodies(groups):  # loaders let go of the groups that the planner has taken
            body.hold()
        nursery.start_soon(self._make, making, groups)

    def no_more(self) -> None:
        """`run` returns once all started steps have their tickets."""
        self._sender.close()

    async def run(self) -> None:
        """Give the started steps their tickets, in order."""
        async for making in self._receiver:
            assert self._sink is not None
            await self._keep_pace()
            plan = making.plan
            with self._waits.on(Cause.STORE):
                making.ticket = await self._sink.producer.reserve(
                    position=plan.after.position(),
                    records=self._spec.records(plan.spans, plan.shape),
                    payload_bytes=self._payload_bytes or plan.room * PAYLOAD_BYTES_PER_TOKEN,
                )
            making.reserved_s = trio.current_time()
            making.reserved.set()
            self._unsettled.append(making)

    def _note_settled(self) -> None:
        """In order: a step settled behind a gap is not certain to be committed."""
        while self._unsettled and self._unsettled[0].done.is_set():
            making = self._unsettled.popleft()
            now_s = trio.current_time()
            self._waits.note(Cause.WORKERS, now_s - max(making.reserved_s, self._settled_s))
            self._settled_s = now_s
            self._room.give(self._row_bytes(making.plan))
            self._appended(making.plan)

    def _row_bytes(self, plan: StepPlan) -> int:
        rows = plan.spans[:, len(SPAN_COLUMNS) :].sum(axis=0).tolist()
        return sum(count * column.row_bytes for count, column in zip(rows, self._spec.columns, strict=True))

    async def _keep_pace(self) -> None:
        """A pace is a limit, and lost time is not made up for."""
        if self._interval_s:
            with self._waits.on(Cause.PACE):
                await trio.sleep_until(self._due_s)
            self._due_s = max(self._due_s, trio.current_time()) + self._interval_s

    async def _make(self, making: _PendingStep, groups: Mapping[str, tuple[Group, ...]]) -> None:
        spans, bodies = await trio.to_thread.run_sync(spans_of, making.plan, groups)
        await making.reserved.wait()
        sink, ticket = self._sink, making.ticket
        assert sink is not None
        assert ticket is not None
        producer = sink.producer
        tickets = itertools.chain([ticket], iter(lambda: producer.renew(ticket), None))
        descriptor = await self._tasks.carry_out(
            f"making step {making.plan.step}",
            "",
            sink.put,
            self._spec,
            spans,
            sink.destination,
            PerAttempt(lambda: next(tickets)),  # a lost constructor's object may still come
            *bodies,
        )
        producer.settle(ticket, descriptor)
        self._payload_bytes = descriptor.payload_bytes
        for body in _bodies(groups):  # not before it is durable: its worker may die
            body.let_go()
        making.done.set()
        self._note_settled()


def _bodies(groups: Mapping[str, Sequence[Group]]) -> list[KeptBody]:
    return [group.body for of_source in groups.values() for group in of_source if group.body is not None]
