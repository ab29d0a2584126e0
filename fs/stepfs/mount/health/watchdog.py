"""A stuck daemon logs its stacks, and in the end releases its readers.

    beat    every `interval_s`, in the loop: the loop runs. Does the kernel get answers? Traffic proves it; without
            traffic a statfs through the mount does, in a thread of its own.
    stuck   no beat for `stuck_s`: all threads' stacks go to stderr. A loop that runs while the mount does not answer
            logs its tasks instead.
    abort   no beat, or no answer, for `abort_s`: the FUSE connection is aborted, so that readers fail instead of
            hanging, and the process ends; a supervisor starts another, which clears the dead mount.

systemd gets WATCHDOG=1 only while both proofs are fresh (sd_watchdog_enabled(3)), so it ends even a process that this
thread cannot end: one whose loop keeps the GIL; SIGABRT shows its stack. Time is counted in ticks of the watching
thread, never as a difference of clocks: a process that was stopped, or a machine that slept, was not stuck. Rejected:
`faulthandler`'s own timer, which cannot distinguish the two and, after SIGCONT, walks the frames of a loop that runs
again: 7 of 10 daemons ended in SIGSEGV. The guardian (guardian.py) handles killed daemons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import trio

from stepfs.mount.health.stacks import task_tree, thread_stacks, write_aside
from stepfs.mount.host.abort import CONNECTIONS

_log = logging.getLogger("stepfs.mount")

_LAST_WORDS_S: Final = 1.0
_CONNECTIONS: Final = Path(CONNECTIONS)


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
            min(self.interval_s, asked_s / 3),
            min(self.stuck_s, asked_s / 2),
            min(self.abort_s, asked_s * 0.9),
        )


TIMING = Timing()


@dataclass(eq=False, kw_only=True)
class Watchdog:
    """Watches one mount, from its first answer until it is detached."""

    directory: Path | None  # None: the mount cannot be seen from here, and the running loop is the only proof
    notify: Callable[[str], object]  # the supervisor: `sdnotify.SystemdNotifier.notify`
    answered: Callable[[], int]  # requests answered so far
    unanswered: Callable[[], int | None]  # requests that the kernel waits for now; None: unknown
    busy: Callable[[], bool]  # waiting requests take all slots; they end by deadlines of their own
    status: Callable[[], str]
    on_stuck: Callable[[], object]  # called in the watching thread
    timing: Timing

    def __post_init__(self) -> None:
        self._turns = 0  # written by the loop, read by the watching thread
        self._proofs = 0
        self._shown = False  # the stacks of this standstill; written by the watching thread
        self._over = threading.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self._watching():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._turn)
                nursery.start_soon(self._prove)
                task_status.started()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, name="stepfs watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()

    async def _turn(self) -> None:
        """The loop's own sign of life. It logs the length of a standstill afterwards: a stuck loop cannot log."""
        interval_s, stuck_s = self.timing.interval_s, self.timing.stuck_s
        proofs, deaf_s, said = self._proofs, 0.0, ""
        answered = self.answered()
        warned = False
        while True:
            self._turns += 1
            began = time.monotonic()  # not trio's clock, which does not count a standstill
            # Our own statfs may hang on its way to the mount, in the file system around the directory.
            if self.busy() or self.answered() != answered or self.unanswered() == 0:
                answered = self.answered()
                self._proofs += 1
            deaf_s += interval_s  # not wall time: a stalled loop must not also count as an unresponsive mount
            if self._proofs != proofs:
                proofs, deaf_s, warned = self._proofs, 0.0, False
            if deaf_s < stuck_s:
                self.notify("WATCHDOG=1")
            elif not warned:
                warned = True
                _log.error("the mount has not answered for %.0f s. Tasks:\n%s", deaf_s, task_tree())
            status = self.status()
            if status != said:
                said = status
                self.notify(f"STATUS={status}")
            await trio.sleep(interval_s)
            late_s = time.monotonic() - began - interval_s
            if late_s >= stuck_s:
                why = "the stacks are above" if self._shown else "the process was stopped, or kept the GIL"
                _log.error("the event loop stood still for %.0f s: %s", late_s, why)

    async def _prove(self) -> None:
        """Check that the kernel gets answers, by a request of our own; only without other traffic."""
        directory, threads = self.directory, trio.CapacityLimiter(1)
        seen = self.answered()
        while True:
            if directory is not None and self.answered() == seen:
                with contextlib.suppress(OSError):  # an error is an answer, too
                    await trio.to_thread.run_sync(os.statvfs, directory, abandon_on_cancel=True, limiter=threads)
            seen = self.answered()
            self._proofs += 1
            await trio.sleep(self.timing.interval_s)

    def _watch(self) -> None:
        """The watching thread: it takes no lock that the loop may hold, so it does not log."""
        tick_s = self.timing.interval_s / 4
        silent_s = [0.0, 0.0]
        seen = [-1, -1]
        before = time.monotonic()
        while not self._over.wait(tick_s):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * tick_s), now
            for place, count in enumerate((self._turns, self._proofs)):
                silent_s[place] = 0.0 if count != seen[place] else silent_s[place] + passed_s
                seen[place] = count
            stuck = silent_s[0] >= self.timing.stuck_s
            if stuck and not self._shown:
                with contextlib.suppress(OSError, RuntimeError):  # no descriptor or no thread left: end nevertheless
                    write_aside(thread_stacks())
            self._shown = stuck
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
    last_words = b"stepfs: the daemon is stuck; its connection was aborted, so that readers fail and do not hang\n"
    try:
        if handle is not None:
            os.write(handle, b"1")
        write_aside(last_words).join(_LAST_WORDS_S)
    finally:
        os._exit(1)
