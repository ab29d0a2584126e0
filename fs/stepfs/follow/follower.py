"""Following the log: looks for new steps, their intervals, and who is told.

Publishing is one assignment inside `LogReader.poll`, on the loop's own thread, so handlers see a step complete or not
at all. An outage of the store does not affect readers of local bytes: it is logged once, and the look is repeated.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs._internal import tracing
from stepfs._internal.clock import SystemClock
from stepfs._internal.histogram import Histogram
from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs.follow.changes import Changes
from stepfs.follow.polling import PollInterval, Spacing
from stepfs.format.ids import Step
from stepfs.lake.log.reader import LogReader

_log = logging.getLogger("stepfs.mount")


IDENTITY_CHECK_S: Final = 60.0
_TICK_S: Final = 0.5  # in which a lookup or listing is noticed while looks are put off
_LAZY_LOOKS: Final = 2  # so many intervals of reading must be known
SILENCE_S: Final = 5.0  # a hanging store fails a request only after many times this


@dataclass(eq=False)
class Follower:
    """Follows one lake until cancelled; raises `RefusedError` when another lake took its URL.

    Looks are put off while the readers here have far to the frontier and nobody asks where that is; then a few GETs read
    what carriers have.
    """

    reader: LogReader
    changes: Changes
    poll_s: float
    find_lake_id: Callable[[], Awaitable[str]]
    on_change: Callable[[], None]
    spacing: Spacing = field(default_factory=Spacing)
    now_ms: Callable[[], int] = field(default_factory=lambda: SystemClock().now_ms)
    ahead_s: Callable[[], float] = lambda: 0.0  # how long the readers here can go on with the steps that are known
    asked: Callable[[], int] = lambda: 0  # how often somebody looked where new steps would show

    def __post_init__(self) -> None:
        self.lag_s = Histogram()  # from the newest commit of a look, by its producer's clock, to the look
        self.pace = PollInterval(self.poll_s)
        self.interval_s = self.poll_s  # from the last look to the next: of `pace`, or longer by `spacing`
        self._shown = (self.reader.state.version, self.reader.first_live_step)
        # The reason why the last look failed, or that of the daemon before.
        self._failure: str | None = None if self.reader.astray is None else str(self.reader.astray)
        # Clock and start time of the look under way.
        self._asked: tuple[trio.abc.Clock, float] | None = None
        self._began = 0.0  # trio time at which the last look or check began
        self._asked_before = 0  # when that look began
        self._skims = False  # the next look
        self._checks = 0  # of the lake's identity and of its history, in turns
        self.looked_at: float | None = None  # trio time of the last look that succeeded
        self._away_since_s: float | None = None  # trio time at which the first of the looks that fail began
        self._away_s = 0.0  # of the outages that ended

    @property
    def frontier(self) -> Step:
        """The newest committed step; -1 before the first."""
        return Step(self.reader.state.next_step - 1)

    @property
    def trouble(self) -> str | None:
        """Why the lake cannot be followed now; None while all is well. Any thread may call it, as scrapes do."""
        asked = self._asked
        silent_s = 0.0 if asked is None else asked[0].current_time() - asked[1]
        if self._failure is None and silent_s > SILENCE_S:
            return "the store does not answer"
        return self._failure

    def away_s(self) -> float:
        """How long the lake could not be followed, in all, up to now."""
        since_s = self._away_since_s
        if since_s is None and self._asked is not None and trio.current_time() - self._asked[1] > SILENCE_S:
            since_s = self._asked[1]
        return self._away_s + (0.0 if since_s is None else trio.current_time() - since_s)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look, publish, sleep for the interval that `pace` and `spacing` give."""
        task_status.started()
        self._began = trio.current_time()
        identity_due = trio.current_time() + IDENTITY_CHECK_S
        while True:
            await self._sleep()
            self._began, self._asked_before = trio.current_time(), self.asked()
            due = trio.current_time() >= identity_due
            # At the shortest interval the check replaces a look, so that there is one request per `--poll`;
            # at a longer interval it is an additional request, so that it delays no step.
            if not (due and self.pace.is_shortest and self.interval_s <= self.pace.interval_s):
                await self._guarded(self._look)
            if due:
                identity_due = trio.current_time() + IDENTITY_CHECK_S
                await self._guarded(self.reader.check_history if self._checks % 2 else self.check_identity)
                self._checks += 1

    async def _sleep(self) -> None:
        """Sleep until one interval after the last look began, the shortest one if a reader waits."""
        began = self._began
        if self.changes.listeners and self._failure is None:
            self.pace.awaited()
        self.interval_s = self.spacing.poll_s(self.pace.interval_s)
        self._skims = False
        with trio.move_on_at(began + self.interval_s):
            await self._until_hurried(began)
            return
        lazy_s = self.spacing.lazy_s()
        while self._is_lazy(lazy_s) and trio.current_time() < began + lazy_s:
            with trio.move_on_after(_TICK_S):
                await self._until_hurried(began)
                return
        self._skims = self._is_lazy(lazy_s)

    async def _until_hurried(self, began: float) -> None:
        """Return when a listener has come, and the shortest interval is over."""
        await self.changes.wait_for_listener()
        if self._failure is None:
            self.pace.awaited()
        self.interval_s = min(self.interval_s, self.spacing.poll_s(self.pace.interval_s))
        await trio.sleep_until(began + self.interval_s)

    def _is_lazy(self, lazy_s: float) -> bool:
        """Whether nobody here would notice a look that comes so much later."""
        fails = self._failure is not None or self.reader.astray is not None
        if fails or self.changes.listeners or self.asked() != self._asked_before:
            return False
        return self.ahead_s() >= _LAZY_LOOKS * lazy_s

    async def _look(self) -> None:
        if self.reader.astray is not None:
            await self.reader.check_history()
        clock = trio.lowlevel.current_clock()
        self._asked = clock, clock.current_time()
        try:
            changed = await self.reader.poll(self._show, skims=self._skims)
        finally:
            self._asked = None
            self.spacing.note_look()
            if tracing.ring is not None:
                took_s = clock.current_time() - self._began
                tracing.ring.add("looks at the log", "look", took_s, head=self.reader.state.version)
        self.looked_at = trio.current_time()
        if changed:
            self._show()
            self.pace.arrived(self.looked_at)
        else:
            self.pace.idle(self.looked_at)

    def _show(self) -> None:
        """Notify listeners of steps published since the last call."""
        version, _ = before = self._shown
        self._shown = (self.reader.state.version, self.reader.first_live_step)
        if self._shown != before:
            self._note_lag(version)
            self.on_change()
            self.changes.notify()

    def _note_lag(self, version: int) -> None:
        state = self.reader.state
        if state.version > version:  # more than the floor has moved
            self.lag_s.observe(max(0, self.now_ms() - state.time_ms) / 1000)
            newest = state.next_step - 1
            if tracing.ring is not None:
                tracing.ring.add("commits seen", f"steps up to {newest}", step=newest, version=state.version)
            _log.debug("steps up to %d are visible", newest, extra={"step": newest, "version": state.version})

    async def check_identity(self) -> None:
        """`ReplacedError` if another lake took the URL (hazard 7): this reader's lake is gone, so it must not go on."""
        found = await self.find_lake_id()
        if found != self.reader.identity.lake_id:
            raise ReplacedError(
                f"the lake {self.reader.identity.lake_id} was replaced by {found} under its URL; mount the new one"
            )

    async def _guarded(self, step: Callable[[], Awaitable[object]]) -> None:
        try:
            await step()
        except ReplacedError:
            raise
        except StepfsError as error:
            self._failed(error)
        else:
            if self._away_since_s is not None:
                self._away_s, self._away_since_s = self.away_s(), None
            if self._failure is not None:
                _log.warning("the store answers again")
                self._failure = None

    def _failed(self, error: StepfsError) -> None:
        if self._away_since_s is None:
            self._away_since_s = self._began
        if self._failure is None:
            quiet = (
                "what is in memory stays readable" if isinstance(error, StoreUnreachableError) else "the view stands"
            )
            state = self.reader.state
            facts = {"step": state.next_step - 1, "version": state.version}
            _log.warning("cannot follow the lake (%s): %s", quiet, error, extra=facts)
        self._failure = str(error)
        if self.reader.astray is not None or self.reader.newer is not None:
            self.on_change()
            self.changes.notify()  # nobody waits for a step that is never seen here
        self.pace.failed()


class ReplacedError(RefusedError):
    """The lake was dropped and recreated under its URL: unmount, and mount the new one if you want it."""
