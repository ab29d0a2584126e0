"""trio's run loop for virtual time: the same order of events, without what only real clocks and files need.

A simulated cluster spends its time between its tasks: thousands of pauses, each a pass of the loop that asks the kernel
for events, looks for instruments and makes three objects to deliver one `None`. While `virtual_loop` is in force,
`trio.run` makes its passes here. A pause is one `yield` of its length; if nobody else is due before its end, the clock
moves and the same task goes on. Every decision with a random part is made as trio makes it under its switch for
Hypothesis, so a seed's interleaving is the one that trio's own loop gives it (`test_faulty_store.py` compares them).

Left out: instruments and guest mode. Threads and files are served when nothing else is due.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import outcome
import trio

_trio: Any = sys.modules["trio._core._run"]
_sleep: Any = trio.sleep
_WAIT_S_MAX: Final = 24 * 3600.0  # real seconds that the kernel is given to come up with an event
_in_force: ContextVar[bool] = ContextVar("virtual loop", default=False)

Events = Any  # what trio's IO manager found


class _Sleep(float):
    """Seconds of a `trio.sleep`: when it ends counts as a deadline does."""

    __slots__ = ()


@types.coroutine
def pause(seconds: float) -> Generator[Any, Any, None]:
    """`trio.sleep`; under `virtual_loop` cheaper, and what is due at its very end comes after it."""
    if not _in_force.get():
        yield from _sleep(seconds)
        return
    answer = yield max(float(seconds), 0.0)
    if answer is not None:
        answer.unwrap()


@types.coroutine
def _cheap_sleep(seconds: float) -> Generator[Any, Any, None]:
    """What `trio.sleep` is under `virtual_loop`: no cancel scope, no exception."""
    if 0.0 < seconds < math.inf:
        answer = yield _Sleep(seconds)
        if answer is not None:
            answer.unwrap()
        elif _trio.GLOBAL_RUN_CONTEXT.task._cancel_status.effectively_cancelled:
            # Cancelled at the very end: the scope of trio's own sleep lets the outer one have the exception.
            raise trio.Cancelled._create(source="unknown", reason="cancelled as it woke")
    else:
        yield from _sleep(seconds)


@contextmanager
def virtual_loop() -> Iterator[None]:
    """`trio.run` makes its passes here; its clock has to be a `MockClock` at rate 0."""
    outer = trio.sleep, _trio.unrolled_run
    trio.sleep, _trio.unrolled_run = _cheap_sleep, _run
    token = _in_force.set(True)
    try:
        yield
    finally:
        _in_force.reset(token)
        trio.sleep, _trio.unrolled_run = outer


@trio.lowlevel.enable_ki_protection
def _run(runner: Any, main: Callable[..., Any], arguments: Any) -> Generator[float, Events, None]:
    """What `trio.run` drives: yields how long the kernel may take to find events, and is sent what it found."""
    try:
        runner.entry_queue.wakeup.wakeup_on_signals()
        runner.clock.start_clock()
        runner.init_task = runner.spawn_impl(runner.init, (main, arguments), None, "<init>", system_task=True)
        yield from _Passes(runner).until_nobody_is_left()
    except trio.TrioInternalError:
        raise
    except BaseException as error:
        raise trio.TrioInternalError("the virtual loop failed") from error
    finally:
        runner.close()
        _trio.GLOBAL_RUN_CONTEXT.__dict__.clear()
        if runner.ki_pending:
            runner.main_task_outcome = outcome.Error(KeyboardInterrupt())


def _give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
    """A pause or a sleep may be cancelled; `_is_waiting` tells that it was."""
    return trio.lowlevel.Abort.SUCCEEDED


_Heap = list[tuple[float, int, Any, int]]  # (until, tie-break, who, its schedule point)


class _Passes:
    """The passes of one run. Pauses and sleeps are apart: a pause is over when the clock jumps to its end, a sleep in
    the pass after that, with the deadlines.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.clock = runner.clock
        self.scopes = runner.deadlines
        self.calls, self.idempotent_calls = runner.entry_queue.queue, runner.entry_queue.idempotent_queue
        self.numbers = itertools.count()
        self.pauses: _Heap = []
        self.sleeps: _Heap = []

    @trio.lowlevel.enable_ki_protection
    def until_nobody_is_left(self) -> Generator[float, Events, None]:
        runner, ready, shuffle, context = self.runner, self.runner.runq, _trio._r.shuffle, _trio.GLOBAL_RUN_CONTEXT
        while runner.tasks:
            idle = not ready
            if idle and self.wake_watchers():
                continue
            if idle and not self.pauses and self.deadline() == math.inf:
                runner.io_manager.process_events((yield _WAIT_S_MAX))
            elif self.is_called():
                runner.io_manager.process_events((yield 0.0))
            if self.expire(self.clock._virtual_base):
                idle = False
            if idle and not ready:
                self.jump()
            if len(ready) == 1:
                context.task = task = ready.popleft()
                self.step(task, alone=True)
                continue
            batch = list(ready)
            ready.clear()
            batch.sort(key=_age)
            shuffle(batch)
            while batch:
                context.task = task = batch.pop()
                self.step(task, alone=not batch)

    def wake_watchers(self) -> bool:
        """Wake those of `wait_all_tasks_blocked`: they come before the clock jumps."""
        watchers = self.runner.waiting_for_idle
        if not watchers or self.is_called():
            return False
        cushion = watchers.keys()[0][0]
        while watchers and watchers.keys()[0][0] == cushion:
            _, task = watchers.popitem(0)
            self.runner.reschedule(task)
        return True

    def is_called(self) -> bool:
        """By another thread, or by a signal."""
        return bool(self.calls or self.idempotent_calls)

    def deadline(self) -> float:
        """When the next sleep or cancel scope ends; infinite if none will."""
        at: float = self.scopes.next_deadline()
        sleeps = self.sleeps
        while sleeps and not _is_waiting(sleeps[0]):
            heapq.heappop(sleeps)
        return min(at, sleeps[0][0]) if sleeps else at

    def expire(self, now: float) -> bool:
        """Cancel the scopes and end the sleeps that are due; whether there were any."""
        scopes = self.scopes
        cancelled = scopes._heap and scopes._heap[0][0] <= now and scopes.expire(now)
        return (bool(self.sleeps) and self.wake(self.sleeps, now)) or bool(cancelled)

    def wake(self, heap: _Heap, until: float) -> bool:
        woken = False
        while heap and heap[0][0] <= until:
            one = heapq.heappop(heap)
            if _is_waiting(one):
                task = one[2]
                task._next_send_fn, task._abort_func = task.coro.send, None
                self.runner.runq.append(task)
                woken = True
        return woken

    @trio.lowlevel.enable_ki_protection
    def step(self, task: Any, *, alone: bool) -> None:
        """Let a task go on until it waits; `alone`: nobody else can run before it does."""
        send, value = task._next_send_fn, task._next_send
        task._next_send_fn = task._next_send = None
        run = task.context.run
        while True:
            try:
                message = run(send, value)
            except StopIteration as stop:
                ended: Any = outcome.Value(stop.value)
            except BaseException as error:  # noqa: BLE001 - whatever ends a task is its outcome
                ended = outcome.Error(error)
            else:
                task._schedule_points += 1
                if isinstance(message, float):
                    task._cancel_points += 1
                    if not self.is_over(task, message, alone):
                        return
                    send, value = task.coro.send, None
                    continue
                self.block(task, message)
                return
            self.runner.task_exited(task, ended)
            return

    def is_over(self, task: Any, seconds: float, alone: bool) -> bool:
        """Whether the pause or sleep has ended already, since nobody else is due before."""
        runner, clock, pauses, sleeps, scopes = self.runner, self.clock, self.pauses, self.sleeps, self.scopes._heap
        now = clock._virtual_base
        until = now + seconds
        if (
            alone
            and not runner.runq
            and not runner.waiting_for_idle
            and (not pauses or pauses[0][0] > until)
            and (
                ((not scopes or scopes[0][0] > until) and (not sleeps or sleeps[0][0] > until))
                or self.deadline() > until
            )
            and not task._cancel_status.effectively_cancelled
            and not runner.ki_pending
            and not self.is_called()
        ):
            clock._virtual_base += until - now
            if clock._virtual_base >= until or type(seconds) is float:
                return True  # else rounding leaves the rest of a sleep to another jump
        heap = sleeps if type(seconds) is _Sleep else pauses
        heapq.heappush(heap, (until, next(self.numbers), task, task._schedule_points))
        self.wait(task, _give_up)
        return False

    def block(self, task: Any, message: Any) -> None:
        """A task waits for something else than a time."""
        if message is _trio.CancelShieldedCheckpoint:
            self.runner.reschedule(task)
        elif type(message) is _trio.WaitTaskRescheduled:
            task._cancel_points += 1
            self.wait(task, message.abort_func)
        else:
            raise TypeError(f"the virtual loop does not know {message!r}")

    def wait(self, task: Any, abort: Callable[[Any], trio.lowlevel.Abort]) -> None:
        task._abort_func = abort
        if self.runner.ki_pending and task is self.runner.main_task:
            task._attempt_delivery_of_pending_ki()
        task._attempt_delivery_of_any_pending_cancel()

    def jump(self) -> None:
        """Nobody can run: to the next deadline or the end of the next pause, whichever is earlier."""
        pauses, clock = self.pauses, self.clock
        while pauses and not _is_waiting(pauses[0]):
            heapq.heappop(pauses)
        deadline = self.deadline()
        if not pauses or pauses[0][0] > deadline:
            ahead = deadline - clock._virtual_base
            if 0 < ahead < math.inf:
                clock._virtual_base += ahead
            return
        until = pauses[0][0]
        clock._virtual_base += max(until - clock._virtual_base, 0.0)
        self.wake(pauses, until)


def _is_waiting(one: tuple[float, int, Any, int]) -> bool:
    """Whether the task of a heap's entry still waits there: it may have been cancelled and gone on since."""
    _, _, task, point = one
    return task._abort_func is _give_up and task._schedule_points == point


def _age(task: Any) -> int:
    return task._counter  # type: ignore[no-any-return]
