"""The processes of a torture run: each with a role, killed from outside and started again, and none left at the end.

Every process is a process group of its own and dies with this one, even a killed one. A role knows which exit codes
are the ordinary consequence of somebody else's death; any other is a fault.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torture.reader import MOUNT_LOST
from torture.records import Tail

_PR_SET_PDEATHSIG = 1
REFUSED = 4  # to take a mount over whose daemon is killed at that moment, or replaced by another
FENCED = 7
UNREACHABLE = 6
_REAP_S = 60.0  # one that reads a mount ends with its read, which may wait for the store's time-out (20 s)
_SUPERVISED_PAUSE_S = 0.5
# Where the kernel sends requests again, nobody who reads notices that a daemon was killed.
_NOTICED = {MOUNT_LOST, -signal.SIGBUS} if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 9) else set()
TOLERATED = {
    "producer": {UNREACHABLE}, "mount": {UNREACHABLE, REFUSED}, "reclaimer": {UNREACHABLE}, "reader": _NOTICED,
    "sampler": _NOTICED,
}  # fmt: skip
_MUTE_S = 180.0  # a sampler notes something every 5 s unless a file or a directory does not answer


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A process group of its own, its output in a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no Python lock
        )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole group, and wait until it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_REAP_S)


@dataclass
class Frozen:
    """A stopped process, and when it may go on."""

    process: subprocess.Popen[bytes]
    wake_at: float
    awake_at: float = 0.0


@dataclass
class Actor:
    """One role, through all its incarnations."""

    kind: str
    name: str
    command: list[str]
    log: Path
    journal: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float | None = 0.0  # when to start it (again); None: not to be started
    wanted: bool = True
    frozen: Frozen | None = None  # itself, or for a producer its predecessor
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    live_pid: int | None = None  # of the incarnation that last noted its start
    noted_at: float = 0.0
    zombies_fenced: int = 0
    serves: Path | None = None  # of a mount: its directory
    hit_at: float = 0.0  # a keeper and its daemon that die in one moment end the mount, as they should
    other: dict[str, str] = field(default_factory=dict)  # of a mount: the environment of another version
    replaced: list[subprocess.Popen[bytes]] = field(
        default_factory=list
    )  # commands that have another daemon take it over

    def __post_init__(self) -> None:
        self._tail = Tail(self.journal) if self.journal else None

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tend(self, now: float) -> None:
        """Read its notes, notice its end, start it when that is due, wake what sleeps."""
        for note in self._tail.new() if self._tail else []:
            self.noted_at = now
            if "fault" in note:
                self.faults.append(f"{self.name}: {note['fault']}")
            if "started" in note:
                self.live_pid = note["pid"]
        if self.process is not None and self.process.poll() is not None:
            self._ended(self.process.returncode, now)
        for old in [old for old in self.replaced if old.poll() is not None]:
            self.replaced.remove(old)
            self.endings["handed over" if old.returncode == 0 else f"replaced: exit code {old.returncode}"] += 1
            if old.returncode not in {0, *TOLERATED[self.kind]}:
                self.faults.append(f"{self.name} handed over and ended with exit code {old.returncode}")
        if self.process is None and self.wanted and self.start_at is not None and now >= self.start_at:
            self.process = spawn(self.command, self.log, **self.environment)
            self.started_at, self.start_at = now, None
        if self.frozen is not None:
            self._tend_frozen(self.frozen, now)
        if self.kind == "sampler" and self.alive() and now - max(self.noted_at, self.started_at) > _MUTE_S:
            self.faults.append(f"{self.name}: nothing answered it for {_MUTE_S:.0f} s")
            self.end()

    def kill(self, now: float, back_in_s: float) -> None:
        assert self.process is not None
        if self.frozen is not None and self.frozen.process is self.process:
            self.frozen = None
        kill_group(self.process)
        self.endings["kill -9"] += 1
        self.process, self.start_at = None, now + back_in_s

    def replace(self, *, by_the_other: bool) -> None:
        """Another daemon takes the mount over, of this version or of the other one."""
        command = [word for word in self.command if word != "--foreground"]
        environment = self.environment | (self.other if by_the_other else {})
        self.replaced.append(spawn(command, self.log, **environment))

    def kill_daemon(self) -> bool:
        """One that serves the mount, or is about to; its parent starts the next one. False if there is none."""
        assert self.serves is not None
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
                if b"stepfs.mount.daemon" in words and os.fsencode(self.serves) in words:
                    os.kill(int(process.name), signal.SIGKILL)
                    self.endings["kill -9 of a daemon"] += 1
                    return True
        return False

    def kill_replaced(self) -> None:
        kill_group(self.replaced.pop())
        self.endings["kill -9"] += 1

    def freeze(self, now: float, for_s: float) -> None:
        """SIGSTOP. A producer gets a successor at once; others just sleep."""
        assert self.process is not None
        assert self.frozen is None
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.frozen = Frozen(self.process, now + for_s)
        self.endings["SIGSTOP"] += 1
        if self.kind == "producer":
            self.process, self.start_at = None, now

    def may_freeze(self) -> bool:
        """A producer only once it has noted its start: frozen before, it would rightly win when it wakes."""
        settled = self.kind != "producer" or (self.process is not None and self.live_pid == self.process.pid)
        return self.alive() and self.frozen is None and settled

    def end(self) -> None:
        """Whatever is left of it."""
        self.wanted = False
        for process in (self.process, self.frozen.process if self.frozen else None, *self.replaced):
            if process is not None and process.poll() is None:
                kill_group(process)

    def _ended(self, code: int, now: float) -> None:
        self.process = None
        if code == 0 and self.kind in {"producer", "reader", "sampler"}:
            self.wanted = False  # it has done all there was to do
        elif self.wanted:
            self.endings[f"exit code {code}"] += 1
            if code not in TOLERATED[self.kind]:
                self.faults.append(f"{self.name} ended with exit code {code}: {self.last_words()}")
            self.start_at = now + _SUPERVISED_PAUSE_S

    def _tend_frozen(self, frozen: Frozen, now: float) -> None:
        zombie = frozen.process is not self.process
        if not frozen.awake_at:
            ready = not zombie or self.live_pid != frozen.process.pid
            if now >= frozen.wake_at and ready:
                frozen.awake_at = now
                os.killpg(frozen.process.pid, signal.SIGCONT)
                if not zombie:
                    self.frozen = None
        elif (code := frozen.process.poll()) is not None:
            self.frozen = None
            self.endings[f"woken: exit code {code}"] += 1
            self.zombies_fenced += code == FENCED
            if code != FENCED:
                self.faults.append(f"{self.name}: a zombie ended with exit code {code}, not {FENCED} (fenced)")

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(lines[-3:])[-600:]
