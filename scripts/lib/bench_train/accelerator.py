"""The stall as an accelerator causes it: a trainer that sleeps for its compute time, a store behind a token bucket.

Neither competes for this machine's cores with the mount, so that prefetching is measured and not the cores. A step is
one file of 4 MiB; the trainer takes 95 % of the bandwidth. Stall is the wait for data, less what a second read of the
same files takes, as a share of all time, after the first steps: filling the first lead is a row of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.bed import Bed, Mount
from bench.machine import BIN, MIB, program, run
from bench.report import Row, at_most, busy_share, cpu_ticks, load, median
from bench.slowed import slowed

STALL_PERCENT_MAX = 1.0
_DISTURBED_S = 60.0
LATENCY_S = 0.02
_DISTINCT = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """Bytes of a step, how many, how many of them are the beginning; the store's bytes per second, the trainer's share."""

    step_bytes: int = 4 * MIB
    steps: int = 310
    beginning: int = 10
    bandwidths: tuple[float, ...] = (50e6, 100e6)
    share: float = 0.95
    rounds: int = 3

    @classmethod
    def quick(cls) -> Pace:
        return cls(step_bytes=MIB, steps=24, beginning=4, bandwidths=(100e6,), rounds=1)


@dataclass(frozen=True, slots=True)
class Waited:
    """One run, judged."""

    stall: float  # share of the time after the beginning
    beginning_s: float  # waited in the first steps
    longest_s: float
    copy_share: float


def judge(waits: Sequence[float], copies: Sequence[float], *, period_s: float, beginning: int) -> Waited:
    """Waits less the usual copy. `period_s`: the time of a step that waits for nothing but its copy."""
    copy_s = median(copies)
    stalls = [wait - copy_s for wait in waits]
    after = stalls[beginning:]
    return Waited(
        stall=sum(after) / (sum(after) + len(after) * period_s),
        beginning_s=sum(stalls[:beginning]),
        longest_s=max(after),
        copy_share=copy_s / period_s,
    )


def accelerator(bed: Bed, pace: Pace) -> None:
    """Two rows per bandwidth: the stall after the beginning, and the cost of the beginning."""
    url = _lake(bed, pace)
    for bandwidth in pace.bandwidths:
        period_s = pace.step_bytes / (pace.share * bandwidth)
        runs, busy = [], []
        for _ in range(pace.rounds):
            ticks = cpu_ticks()
            waits, copies, _ = _train(bed, url, pace, bandwidth, period_s)
            busy.append(busy_share(ticks, cpu_ticks()))
            runs.append(judge(waits, copies, period_s=period_s, beginning=pace.beginning))
            bed.report.figures[f"accelerator, {bandwidth / 1e6:g} MB/s, {len(runs)}"] = {
                "waits": [round(value, 5) for value in waits],
                "copies": [round(value, 5) for value in copies],
                "period s": period_s,
                "machine busy": busy[-1],
                "load": load(),
            }
        _rows(bed, pace, bandwidth, runs, median(busy))


def disturbed(bed: Bed, pace: Pace) -> None:
    """The same trainer beside nothing, a hand-over a minute, and a kill a minute: rows of what these cost it."""
    url, bandwidth, alone = _lake(bed, pace), pace.bandwidths[0], (0.0, 0)
    period_s = pace.step_bytes / (pace.share * bandwidth)
    for what in ("nothing", "hand-overs", "kills"):
        waits, copies, sent = _train(bed, url, pace, bandwidth, period_s, what)
        waited = judge(waits, copies, period_s=period_s, beginning=pace.beginning)
        bed.report.figures[what] = {"waits": [round(value, 5) for value in waits], "sent bytes": sent}
        alone = (waited.stall, sent) if what == "nothing" else alone
        stall, more = f"{waited.stall:.2%}", 100 * (waited.stall - alone[0])
        text = f"longest wait {1e3 * waited.longest_s:.0f} ms"
        bed.report.add(at_most(0.2, f"stall beside {what}, one a minute", stall, text, more, "points more"))
        bed.report.add(at_most(1.02, "  bytes fetched", f"{sent / 1e6:,.0f} MB", "", sent / alone[1]))


@contextmanager
def _beside(mount: Mount, what: str, replace: list[str], logs: str) -> Iterator[None]:
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(_DISTURBED_S):
            if what == "kills":
                os.kill(json.loads((mount.directory / ".stepfs/config.json").read_text())["pid"], signal.SIGKILL)
            elif what == "hand-overs":
                run(replace, env=os.environ | {"STEPFS_LOG_DIR": logs})

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lake(bed: Bed, pace: Pace) -> str:
    draw = random.Random(9)
    bodies = [draw.randbytes(pace.step_bytes) for _ in range(_DISTINCT)]
    bed.report.say(f"accelerator: {pace.steps} steps of {pace.step_bytes / MIB:g} MiB")
    return bed.lake("sleeper", 1, ([body] for body in itertools.islice(itertools.cycle(bodies), pace.steps)))


def _train(
    bed: Bed, url: str, pace: Pace, bandwidth: float, period_s: float, beside: str = "nothing"
) -> tuple[list[float], list[float], int]:
    with slowed(bed.server.endpoint_url, bandwidth, LATENCY_S) as store:
        options = ("--endpoint-url", store.url, "--memory", "1G")
        with bed.mounted(url, *options) as mount:
            order = {
                "paths": [[str(mount.path(step, 0))] for step in range(pace.steps)],
                "step_bytes": pace.step_bytes,
                "period_s": period_s,
                "copy_s": pace.step_bytes / 2e9,
            }
            replace = [str(BIN / "stepfs"), "mount", url, str(mount.directory), "--replace", *options]
            with _beside(mount, beside, replace, str(bed.directory / "logs")):
                done = run(program("bench_train.sleeping_loop", json.dumps(order)))
            sent = store.sent_bytes()
    found = json.loads(done.stdout)
    return found["waits"], found["copies"], sent


def _rows(bed: Bed, pace: Pace, bandwidth: float, runs: list[Waited], busy: float) -> None:
    stall = median([run.stall for run in runs])
    longest = max(run.longest_s for run in runs)
    what = f"stall of a sleeping trainer at {pace.share:.0%} of {bandwidth / 1e6:g} MB/s"
    text = f"longest wait {1e3 * longest:.0f} ms; copy {median([run.copy_share for run in runs]):.1%}, cores {busy:.0%} busy"
    bed.report.add(at_most(STALL_PERCENT_MAX, what, f"{stall:.2%}", text, 100 * stall, "%"))
    first_s = median([run.beginning_s for run in runs])
    one_s = LATENCY_S + pace.step_bytes / bandwidth
    against = f"one step alone {one_s:.2f} s, then a lead can only grow by 1 − {pace.share:g} a step"
    bed.report.add(Row(f"  waited in the first {pace.beginning} steps", f"{first_s:.2f} s", against))
