"""Waiting on behalf of a caller: for a step to be committed, or for an index segment to be read.

A reader's deadline is absolute per step, from the first waiter on, because the kernel parks the next LOOKUPs on the
directory's lock. Callers that were signalled are released early (`has_signal`).
"""

from __future__ import annotations

import enum
import errno
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import trio

from stepfs._internal.clock import SystemClock, state_text
from stepfs._internal.histogram import Histogram
from stepfs.errors import AbsentError, ReclaimedError, StepfsError, StoreUnreachableError
from stepfs.follow.changes import Changes
from stepfs.format.ids import Step
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.lake.log.reader import LogReader
from stepfs.view.tree import Presence, Tree

_SIGNAL_POLL_S: Final = 0.1
_SIGNAL_POLLS_PER_S: Final = 200  # of all callers together: each reads a file of /proc
_GRACE_S: Final = 1.0  # how much longer a deadline lives than its last waiter
_RETRY_S: Final = 0.5
_TELL_AFTER_S: Final = 10.0
_TELL_EVERY_S: Final = 60.0
_TOLD_PRODUCERS: Final = 3
_log = logging.getLogger("stepfs.mount")

HasPendingSignal = Callable[[int], bool]


class WaitOutcome(enum.Enum):
    """How a wait ended."""

    READY = "ready"
    NEVER = "never"  # sealed, or reclaimed: the step will not come
    EXPIRED = "expired"  # not committed in time
    SILENT = "silent"  # committed, but the store did not deliver its index in time
    INTERRUPTED = "interrupted"  # the caller has a signal pending


@dataclass(slots=True)
class _Deadline:
    at: float
    since: float
    waiters: int = 0
    idle_since: float = 0.0


@dataclass(eq=False)
class Waits:
    """All waiting of one mount. `run` reads the index, so a caller that leaves aborts no request."""

    tree: Tree
    reader: LogReader
    changes: Changes
    deadline_s: float  # of every wait
    wait_s: float | None = None  # of waits for a commit: a wait for a committed step may take longer
    # Of a caller in another process; without it, callers end their waits by cancelling them.
    has_signal: HasPendingSignal | None = None
    tell: Callable[[str], None] = _log.info  # the reason of a long wait for a commit
    among_workers: bool = False  # of several processes with different steps, the one with the next step tells

    def __post_init__(self) -> None:
        self.expired_errno = errno.ETIMEDOUT if self.wait_s is None else errno.ENOENT  # of a wait for a commit
        self.seconds = {"commit": Histogram(), "index": Histogram()}  # duration of waits, by their reason
        self.given = False  # another daemon has the mount: it answers those that wait for a commit
        self._nursery: trio.Nursery | None = None
        self._telling = False
        self._deadlines: dict[Step, _Deadline] = {}
        self._loads: dict[Step, _Load] = {}
        self._callers: dict[int, set[trio.CancelScope]] = {}  # that wait, by pid
        self._called = trio.lowlevel.ParkingLot()

    @property
    def waiting(self) -> int:
        """The number of requests that wait now. Any thread may ask."""
        return sum(deadline.waiters for deadline in self._deadlines.copy().values())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the loads, and look for signals of the callers, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while self.has_signal is not None:
                if not self._callers:
                    await self._called.park()
                await trio.sleep(max(_SIGNAL_POLL_S, len(self._callers) / _SIGNAL_POLLS_PER_S))
                self._release_signalled(self.has_signal)
            await trio.sleep_forever()

    def _release_signalled(self, has_signal: HasPendingSignal) -> None:
        for pid, scopes in list(self._callers.items()):
            if has_signal(pid):
                for scope in scopes:
                    scope.cancel()

    def give(self, *, given: bool) -> None:
        """Whether those that wait for a commit are left to another daemon, which may not know yet what this one sees."""
        self.given = given
        self.changes.notify()

    async def for_files(self, step: Step, pid: int, *, waits: bool = False) -> StepEntry | WaitOutcome:
        """The entry of a step once its files may be opened; never READY. Errors as `for_entry`.

        `waits`: wait for the commit of any step that may come, not only of those that the view shows before it.
        """
        while True:
            presence = self.tree.presence(step)
            if presence is Presence.COMMITTED:
                entry = self.reader.entry_if_loaded(step) or await self.for_entry(step, pid)
                if isinstance(entry, WaitOutcome) or self.tree.readable(step):
                    return entry
            elif presence is Presence.PENDING or (waits and presence is Presence.ABSENT and self.tree.awaited(step)):
                outcome = await self.for_commit(step, pid)
                if outcome is not WaitOutcome.READY:
                    return outcome
            else:
                return WaitOutcome.NEVER

    async def for_commit(self, step: Step, pid: int) -> WaitOutcome:
        """Wait until `step` is committed. After READY the step may already have been reclaimed.

        `OtherHistoryError` if the log is another one by now, `NewerFormatError` if another version has to read it.
        """
        deadline = self._enter(step)
        if not self._telling and self._nursery is not None:
            self._telling = True
            self._nursery.start_soon(self._tell)
        try:
            with self._timed("commit"), self.changes.listening():
                while True:
                    changed = self.changes.next_change
                    never = self.reader.astray or self.reader.newer
                    if not self.given and never is not None and step >= self.tree.next_step:
                        raise type(never)(*never.args)
                    if not self.given and not self.tree.awaited(step):
                        return WaitOutcome.READY if step < self.tree.next_step else WaitOutcome.NEVER
                    outcome = await self._watch(changed, deadline.at, pid)
                    if outcome is not WaitOutcome.READY:
                        return outcome
        finally:
            self._leave(step, deadline)

    async def _tell(self) -> None:
        """Tell what the readers wait for: 10 s after the first of them came, then each minute, until none waits."""
        told_at = -math.inf
        while waited := [step for step, deadline in self._deadlines.items() if deadline.waiters]:
            step = min(waited)
            due = max(self._deadlines[step].since + _TELL_AFTER_S, told_at + _TELL_EVERY_S)
            if trio.current_time() >= due:
                told_at = trio.current_time()
                if not self.among_workers or step == self.tree.next_step:
                    self.tell(f"waiting for step {step}; {_committed(self.reader.state, SystemClock().now_ms())}")
            else:
                await trio.sleep(min(due - trio.current_time(), _TELL_AFTER_S))
        self._telling = False

    async def for_entry(self, step: Step, pid: int) -> StepEntry | WaitOutcome:
        """The entry of a committed step whose index segment is not loaded; never READY.

        Raises the reader's errors, except that an unreachable store is retried until the deadline.
        """
        with self._timed("index"):
            found = await self._loaded(step, pid, trio.current_time() + self.deadline_s)
        return WaitOutcome.SILENT if found is WaitOutcome.EXPIRED else found

    async def _loaded(self, step: Step, pid: int, until: float) -> StepEntry | WaitOutcome:
        while True:
            load = self._load(step)
            outcome = await self._watch(load.done, until, pid)
            if outcome is not WaitOutcome.READY:
                return outcome
            if load.error is None:
                entry = self.reader.entry_if_loaded(step)
                if entry is not None:
                    return entry
                if not self.tree.readable(step):
                    return WaitOutcome.NEVER
            elif isinstance(load.error, ReclaimedError) or (
                isinstance(load.error, AbsentError) and not self.tree.readable(step)
            ):
                return WaitOutcome.NEVER
            elif not isinstance(load.error, StoreUnreachableError):
                raise type(load.error)(*load.error.args)  # a fresh exception: its traceback is this caller's
            outcome = await self._watch(trio.Event(), min(until, trio.current_time() + _RETRY_S), pid)
            if outcome is WaitOutcome.INTERRUPTED or trio.current_time() >= until:
                return outcome

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = trio.current_time()
        try:
            yield
        finally:
            self.seconds[what].observe(trio.current_time() - began)

    async def _watch(self, event: trio.Event, until: float, pid: int) -> WaitOutcome:
        """READY when the event is set, EXPIRED at `until`, INTERRUPTED when the caller has a signal."""
        if event.is_set():
            return WaitOutcome.READY
        if self.has_signal is not None and self.has_signal(pid):
            return WaitOutcome.INTERRUPTED
        with trio.CancelScope(deadline=until) as scope, self._watched(pid, scope):
            await event.wait()
        if event.is_set():
            return WaitOutcome.READY
        return WaitOutcome.EXPIRED if trio.current_time() >= until else WaitOutcome.INTERRUPTED

    @contextmanager
    def _watched(self, pid: int, scope: trio.CancelScope) -> Iterator[None]:
        scopes = self._callers.setdefault(pid, set())
        scopes.add(scope)
        self._called.unpark_all()
        try:
            yield
        finally:
            scopes.discard(scope)
            if not scopes:
                self._callers.pop(pid, None)

    def _enter(self, step: Step) -> _Deadline:
        now = trio.current_time()
        for other in [s for s, d in self._deadlines.items() if not d.waiters and now >= d.idle_since + _GRACE_S]:
            del self._deadlines[other]
        deadline = self._deadlines.get(step)
        if deadline is None:
            deadline = self._deadlines[step] = _Deadline(
                now + (self.deadline_s if self.wait_s is None else self.wait_s), now
            )
        deadline.waiters += 1
        return deadline

    def _leave(self, step: Step, deadline: _Deadline) -> None:
        deadline.waiters -= 1
        if step < self.tree.next_step and not deadline.waiters:
            self._deadlines.pop(step, None)
        elif trio.current_time() < deadline.at or not deadline.idle_since:
            # Not renewed once expired: a caller that keeps trying gets a new deadline after the grace.
            deadline.idle_since = trio.current_time()

    def _load(self, step: Step) -> _Load:
        load = self._loads.get(step)
        if load is None:
            assert self._nursery is not None, "`run` is not running"
            load = self._loads[step] = _Load(trio.Event())
            self._nursery.start_soon(self._run_load, load, step)
        return load

    async def _run_load(self, load: _Load, step: Step) -> None:
        try:
            await self.reader.lone_entry(step)
        except StepfsError as error:
            load.error = error
        finally:
            del self._loads[step]
            load.done.set()


def _committed(state: LogState, now_ms: int) -> str:
    """How far the lake is, and the producers that committed last."""
    newest = sorted((each for each in state.producers.values() if not each.retired), key=lambda each: -each.time_ms)
    producers = [
        f"producer {each.producer_id} {state_text(each.time_ms, now_ms, retired=False)}"
        for each in newest[:_TOLD_PRODUCERS]
    ]
    if len(newest) > _TOLD_PRODUCERS:
        producers.append(f"and {len(newest) - _TOLD_PRODUCERS} more")
    return f"{state.next_step} are committed; {', '.join(producers) or 'no producer is known'}"


@dataclass(slots=True)
class _Load:
    done: trio.Event
    error: StepfsError | None = None
