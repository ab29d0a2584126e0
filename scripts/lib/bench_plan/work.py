"""Work that follows cost: a rare, costly source uses all workers; a worker that hangs costs seconds, not the run.

Sleeping functions stand for work, so that there are as many workers as wanted on two cores.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from bench.machine import BIN, stat_of
from bench.report import Report, at_least, load
from bench_plan.faults import Lake, disturbed, read_lake, write_texts
from torture.planned.command import workers_of

FASTER = 3.5
_GAP_S = 7.0
_STOP_EVERY_S = 9.0  # longer than a late task and the start of a new spare
_RECORD_BYTES = 700
_MODULE = """\
import time

def costly(record):
    time.sleep({costly})
    return record["text"]

"""
_PLAN = """\
version: 1
output: {{ext: .safetensors, mesh: "dp=2", sequence_length: 1024, micro_batch_tokens: 4096}}
defaults: {{shuffle: {{block: 256KiB}}}}
sources:
  {sources}
mix: {{{mix}}}
"""
COSTLY = "costly: {format: jsonl, files: costly/, transform: 'slow:costly'}"
TEXT = "text: {format: jsonl, files: text/}"


def cost(report: Report, directory: Path, *, quick: bool) -> None:
    """A source of 5 % of the tokens at 0.2 s a record, with 2 and with 8 workers."""
    steps = 60 if quick else 150
    plan = write_plan(directory, {"costly": COSTLY, "text": TEXT}, "costly: 5, text: 95", costly_s=0.2)
    took_s = {}
    digests = set()
    for workers in (2, 8):
        lake = directory / f"lake-{workers}"
        _run(plan, lake, workers, steps)
        found = read_lake(lake)
        took_s[workers] = found.times_s[-1] - found.times_s[0]
        digests.add(digest(found))
    if len(digests) > 1:
        raise SystemExit("bench_plan: the number of workers shows in the steps")
    report.figures["cost"] = {"seconds": took_s, "load": load()}
    report.add(
        at_least(
            FASTER,
            "5 % of the tokens at 0.2 s a record: 8 workers against 2, first to last commit",
            f"{took_s[8]:.1f} s, {steps} steps equal",
            f"{took_s[2]:.1f} s",
            took_s[2] / took_s[8],
        )
    )


def late(report: Report, directory: Path, *, quick: bool) -> None:
    """A worker is stopped in the middle of whatever it does, again and again."""
    plan = write_plan(directory, {"costly": COSTLY, "text": TEXT}, "costly: 5, text: 95", costly_s=0.02)
    steps = 400 if quick else 1200
    disturbed(report, "a worker stopped", plan, steps, _stop_one_worker, every_s=_STOP_EVERY_S, gap_s=_GAP_S)


def _stop_one_worker(pid: int) -> int:
    """One that works if there is one; the others wait in a read of their pipe."""
    states: dict[int, str] = {}
    for worker in workers_of(pid):
        with suppress(OSError):
            states[worker] = stat_of(Path(f"/proc/{worker}"))[0]
    workers = [worker for worker, state in states.items() if state not in "TZ"]
    busy = [worker for worker in workers if states[worker] == "R"] or workers
    for worker in busy[:1]:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
    return len(busy[:1])


def write_plan(directory: Path, sources: dict[str, str], mix: str, *, costly_s: float = 0.0) -> Path:
    write_texts(directory, sources, lambda _: _RECORD_BYTES)
    (directory / "slow.py").write_text(_MODULE.format(costly=costly_s))
    path = directory / "plan.yaml"
    path.write_text(_PLAN.format(sources="\n  ".join(sources.values()), mix=mix))
    return path


def command(plan: Path, lake: Path, workers: int, steps: int) -> list[str]:
    words = [str(BIN / "stepfs-produce"), "run", str(plan), lake.as_uri(), "--workers", str(workers)]
    return [*words, "--limit-steps", str(steps)]


def _run(plan: Path, lake: Path, workers: int, steps: int) -> None:
    done = subprocess.run(command(plan, lake, workers, steps), stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"bench_plan: stepfs-produce run ended with exit code {done.returncode}")


def digest(lake: Lake) -> str:
    return hashlib.sha256("".join(lake.digests).encode()).hexdigest()
