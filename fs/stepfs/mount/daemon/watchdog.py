"""A stuck daemon writes its stacks to the log, and in the end releases its readers; so does SIGUSR1 for the stacks.

beat    every `interval_s`: the loop runs; requests were answered or are held, or the kernel waits for none
stuck   no beat for `stuck_s`: all threads' stacks go to stderr
abort   no beat, or no answer, for `abort_s`: the process ends, and the next daemon serves; or the connection is aborted
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import trio

from stepfs.mount.host.abort import CONNECTIONS

_log = logging.getLogger("stepfs.mount")

SILENCE_S_MAX: Final = 15.0  # a healthy loop reads the clock more often: the watchdog beats every 10 s

_LAST_WORDS_S: Final = 1.0
_CONNECTIONS: Final = Path(CONNECTIONS)


class RunningTime(trio.abc.Clock):
    """trio's clock for a daemon that may be suspended, in seconds: between two readings at most `silence_s_max` pass.

    Any thread may read it.
    """

    def __init__(self, silence_s_max: float | None = None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Default `SILENCE_S_MAX`."""
        self._silence_s_max = SILENCE_S_MAX if silence_s_max is None else silence_s_max
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looked = monotonic()
        self._now = self._looked

    def start_clock(self) -> None:
        """Called by trio at the start of its loop."""

    def current_time(self) -> float:
        with self._lock:
            looked = self._monotonic()
            self._now += min(looked - self._looked, self._silence_s_max)
            self._looked = looked
            return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    interval_s: float = 10.0
    stuck_s: float = 30.0
    abort_s: float = 120.0

    def under(self, environment: Mapping[str, str], pid: int) -> Timing:
        """The timing that acts before the supervisor that set WATCHDOG_USEC for this process.

        The supervisor ends processes, but only an aborted connection frees a thread that hangs in this very mount.
        """
        usec = environment.get("WATCHDOG_USEC", "")
        if not usec.isdigit() or int(usec) == 0 or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
            return self
        asked_s = int(usec) / 1e6
        return Timing(
            min(self.interval_s, asked_s / 3), min(self.stuck_s, asked_s / 2), min(self.abort_s, asked_s * 0.9)
        )


TIMING = Timing()


@dataclass(eq=False, kw_only=True)
class Watchdog:
    """Watches one mount, from its first answer until it is detached."""

    notify: Callable[[str], object]  # the supervisor: `sdnotify.SystemdNotifier.notify`
    answered: Callable[[], int]  # requests answered so far
    unanswered: Callable[[], int | None]  # requests that the kernel waits for now; None: unknown
    held: Callable[[], int]  # requests that handlers have taken; they end by deadlines of their own
    status: Callable[[], str]
    on_stuck: Callable[[], object]  # called in the watching thread
    timing: Timing

    def __post_init__(self) -> None:
        self._turns = 0  # written by the loop, read by the watching thread
        self._proofs = 0
        self._over = threading.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        threading.Thread(target=self._watch, name="stepfs watchdog", daemon=True).start()
        try:
            task_status.started()
            await self._turn()
        finally:
            self._over.set()

    async def _turn(self) -> None:
        """The loop's own sign of life, and the mount's."""
        interval_s = self.timing.interval_s
        deaf_s, logged = 0.0, ""
        answered = self.answered()
        warned = False
        while True:
            self._turns += 1
            deaf_s += interval_s  # not wall time: a stalled loop must not also count as an unresponsive mount
            if self.answered() != answered or self.held() or not self.unanswered():
                answered, deaf_s, warned = self.answered(), 0.0, False
                self._proofs += 1
            if deaf_s < self.timing.stuck_s:
                self.notify("WATCHDOG=1")
            elif not warned:
                warned = True
                _log.error("the mount has not answered for %.0f s", deaf_s)
            status = self.status()
            if status != logged:
                logged = status
                self.notify(f"STATUS={status}")
            await trio.sleep(interval_s)

    def _watch(self) -> None:
        """The watching thread: it takes no lock that the loop may hold, so it does not log."""
        tick_s = self.timing.interval_s / 4
        silent_s = [0.0, 0.0]
        seen = [-1, -1]
        before, shown = time.monotonic(), False  # the stacks of this standstill
        while not self._over.wait(tick_s):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * tick_s), now
            for place, count in enumerate((self._turns, self._proofs)):
                silent_s[place] = 0.0 if count != seen[place] else silent_s[place] + passed_s
                seen[place] = count
            stuck = silent_s[0] >= self.timing.stuck_s
            if stuck and not shown:
                with suppress(OSError, RuntimeError):  # no descriptor or no thread left: end nevertheless
                    write_aside(thread_stacks())
            shown = stuck
            if max(silent_s) >= self.timing.abort_s:
                self.on_stuck()
                return


def unanswered(device: str, connections: Path = _CONNECTIONS) -> int | None:
    """The number of requests that the kernel waits for on a mount ("0:53"); None if fusectl is not readable."""
    try:
        return int((connections / device.partition(":")[2] / "waiting").read_text())
    except (OSError, ValueError):
        return None


def abort_and_exit(handle: int | None) -> NoReturn:
    """Abort the connection, so that readers get errors; then end the process like a killed one.

    `handle` comes from `abort_handle`. Without one the end of the process closes /dev/fuse, or makes the guardian
    abort the connection. The next mount cleans up.
    """
    try:
        if handle is not None:
            os.write(handle, b"1")
    finally:
        exit_stuck(b"its connection was aborted, so that readers fail and do not hang")


def exit_stuck(last_words: bytes) -> NoReturn:
    """End the process like a killed one."""
    try:
        write_aside(b"stepfs: the daemon is stuck; %b\n" % last_words).join(_LAST_WORDS_S)
    finally:
        os._exit(1)


@contextmanager
def shown_on_signal(nursery: trio.Nursery) -> Iterator[None]:
    """Inside the context SIGUSR1 writes all stacks to stderr; `nursery` listens. Main thread only."""
    with trio.open_signal_receiver(signal.SIGUSR1) as asked:
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False, chain=True)
        nursery.start_soon(_show_threads, asked)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


async def _show_threads(asked: AsyncIterator[int]) -> None:
    async for _ in asked:
        with suppress(OSError, RuntimeError):  # no descriptor or no thread left
            write_aside(thread_stacks())


def thread_stacks() -> bytes:
    """The stacks of all threads, as `faulthandler` writes them: with the GIL held, so no frame changes meanwhile."""
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(descriptor)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def write_aside(data: bytes) -> threading.Thread:
    """Write to stderr in a thread of its own, because the write may block for ever."""

    def write(rest: bytes) -> None:
        with suppress(OSError):  # a full disk, a closed pipe
            while rest:
                rest = rest[os.write(sys.stderr.fileno(), rest) :]

    thread = threading.Thread(target=write, args=[data], name="stepfs stacks", daemon=True)
    thread.start()
    return thread
