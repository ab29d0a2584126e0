"""Waiting on behalf of a caller: for a step to be committed, or for an index segment to be read.

A reader's deadline is absolute per step, from the first waiter on, because the kernel parks the next LOOKUPs on the
directory's lock. Callers that were signalled are released early (`has_signal`).
"""

from __future__ import annotations

import enum
import errno
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs._internal.clock import SystemClock, state_text
from stepfs.data.waiting import Cause, Ledger, Wait
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
_REFUSED_MAX: Final = 8
_ALIKE_MS: Final = 1000
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


@dataclass(frozen=True, slots=True)
class Refused:
    """A reader whose wait ended in vain: it got an error."""

    time_ms: int
    step: Step
    error: str  # errno's name
    why: str


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
    ledger: Ledger = field(default_factory=Ledger)
    away_s: Callable[[], float] = lambda: 0.0  # how long, so far, nobody could see whether a step was committed

    def __post_init__(self) -> None:
        self.expired_errno = errno.ETIMEDOUT if self.wait_s is None else errno.ENOENT  # of a wait for a commit
        self.refused: deque[Refused] = deque(maxlen=_REFUSED_MAX)  # the last ones
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
        began_s, away_s = trio.current_time(), self.away_s()

        def parts() -> dict[Cause, float]:
            unseen_s = min(self.away_s() - away_s, trio.current_time() - began_s)
            return {Cause.COMMIT: trio.current_time() - began_s - unseen_s, Cause.UNREACHABLE: unseen_s}

        try:
            with self.ledger.waiting("commit", step, Cause.COMMIT) as wait, self.changes.listening():
                while True:
                    changed = self.changes.next_change
                    never = self.reader.astray or self.reader.newer
                    if not self.given and never is not None and step >= self.tree.next_step:
                        raise type(never)(*never.args)
                    if not self.given and not self.tree.awaited(step):
                        return WaitOutcome.READY if step < self.tree.next_step else WaitOutcome.NEVER
                    with wait.on(parts):
                        outcome = await self._watch(changed, deadline.at, pid)
                    began_s, away_s = trio.current_time(), self.away_s()
                    if outcome is not WaitOutcome.READY:
                        self._note_refused(step, outcome, trio.current_time() - deadline.since)
                        return outcome
        finally:
            self._leave(step, deadline)

    @property
    def waiting_for(self) -> str | None:
        """What the readers wait for, in a sentence; None if none waits."""
        waited = [step for step, deadline in self._deadlines.items() if deadline.waiters]
        return self._sentence(min(waited)) if waited else None

    def _sentence(self, step: Step) -> str:
        return f"waiting for step {step}; {_committed(self.reader.state, SystemClock().now_ms())}"

    def _note_refused(self, step: Step, outcome: WaitOutcome, waited_s: float) -> None:
        """Its error says little: the reason is in the log, and where `.stepfs/status.json` shows it."""
        now_ms = SystemClock().now_ms()
        last = self.refused[-1] if self.refused else None
        if outcome is WaitOutcome.INTERRUPTED or (last and last.step == step and now_ms - last.time_ms < _ALIKE_MS):
            return  # its other ranks wait for it, too
        if outcome is WaitOutcome.SILENT:
            why, code = f"the store did not deliver the index of step {step}", errno.ETIMEDOUT
        else:
            why, code = f"step {step} was not committed; {_committed(self.reader.state, now_ms)}", self.expired_errno
        why = f"waited {waited_s:.0f} s in vain: {why}"
        self.refused.append(Refused(now_ms, step, errno.errorcode[code], why))
        _log.info("%s", why)

    async def _tell(self) -> None:
        """Tell what the readers wait for: 10 s after the first of them came, then each minute, until none waits."""
        told_at = -math.inf
        while waited := [step for step, deadline in self._deadlines.items() if deadline.waiters]:
            step = min(waited)
            due = max(self._deadlines[step].since + _TELL_AFTER_S, told_at + _TELL_EVERY_S)
            if trio.current_time() >= due:
                told_at = trio.current_time()
                if not self.among_workers or step == self.tree.next_step:
                    self.tell(self._sentence(step))
            else:
                await trio.sleep(min(due - trio.current_time(), _TELL_AFTER_S))
        self._telling = False

    async def for_entry(self, step: Step, pid: int) -> StepEntry | WaitOutcome:
        """The entry of a committed step whose index segment is not loaded; never READY.

        Raises the reader's errors, except that an unreachable store is retried until the deadline.
        """
        with self.ledger.waiting("index", step) as wait, wait.on(dict):
            found = await self._loaded(step, pid, trio.current_time() + self.deadline_s, wait)
        if found is WaitOutcome.EXPIRED:
            found = WaitOutcome.SILENT
            self._note_refused(step, found, self.deadline_s)
        return found

    async def _loaded(self, step: Step, pid: int, until: float, wait: Wait) -> StepEntry | WaitOutcome:
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
            wait.base = Cause.UNREACHABLE
            outcome = await self._watch(trio.Event(), min(until, trio.current_time() + _RETRY_S), pid)
            if outcome is WaitOutcome.INTERRUPTED or trio.current_time() >= until:
                return outcome

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
