"""The machine under a script: commands, mounts, signals, memory, caches, and what a process has used."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

BIN = Path(sysconfig.get_path("scripts"))
_LONG_LAKE = Path(__file__).resolve().parents[2] / "make_long_lake"
MIB = 1 << 20
COMMAND_S = 120.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def program(module: str, *arguments: str) -> list[str]:
    """The command line of a module of `scripts/lib`."""
    return [sys.executable, "-m", module, *arguments]


def run(
    command: list[str], *, env: dict[str, str] | None = None, timeout_s: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """A command that must succeed."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout_s, env=env, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        name = " ".join(Path(word).name for word in command[:3])
        raise SystemExit(f"benchmark: {name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done


def make_long_lake(url: str, steps: int, slices: int) -> None:
    """A long history, metadata only."""
    run([sys.executable, str(_LONG_LAKE), url, "--steps", str(steps), "--slices", str(slices)], timeout_s=3600)


def let_go(directory: Path) -> None:
    """No mount stays behind, whatever state it is in."""
    if is_mounted(directory):
        with suppress(subprocess.TimeoutExpired):
            command = [str(BIN / "stepfs"), "unmount", str(directory)]
            subprocess.run(command, check=False, timeout=COMMAND_S, capture_output=True)
    detach(directory)


def detach(directory: Path) -> None:
    """Whatever still uses the mount."""
    if is_mounted(directory):
        subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False)


def is_mounted(directory: Path) -> bool:
    return f" {directory} " in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


def forget_variables(*prefixes: str) -> None:
    """Nobody's own credentials and options are meant."""
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        del os.environ[name]


def interrupt_once() -> None:
    """Ctrl-C and SIGTERM interrupt; what is cleaned up after that must not be interrupted again."""

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)


def until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for what another process does."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def stat_of(task: Path) -> list[str]:
    """What the kernel says of a process or thread, by its directory in /proc: state, parent, … An `OSError` if it is gone."""
    return (task / "stat").read_text().rpartition(")")[2].split()


def cpu_s(task: int | Path) -> float:
    """Seconds of CPU that a process or a thread has used, in user space and in the kernel."""
    stat = stat_of(Path(f"/proc/{task}") if isinstance(task, int) else task)
    return (int(stat[11]) + int(stat[12])) / _CLOCK_TICKS


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def touch_memory(size: int) -> None:
    """First touch of free memory is slow on virtual machines: have it behind us."""
    with mmap.mmap(-1, size) as memory:
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def drop_caches() -> bool:
    """Empty the page cache; False without the right."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
