"""How much of a step's time is spent waiting for data, at a share of what the store can deliver.

The compute time per step follows from the share: a step of S bytes at share f of the bandwidth B takes S / (f · B). B is
measured in the same run, by 8 MiB ranged GETs of the very objects. The mount's memory is held far below the data, so
that what is read was fetched at that pace.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import servers

from bench.bed import Bed, data_objects
from bench.machine import MIB, program, run, touch_memory
from bench.report import Row, at_most, busy_share, cpu_ticks, median
from bench_train.preprocessing import WORKS, Work, batch

WARM_STEPS = 8
WORKERS = 2
THREADS = 4
_DISTINCT = 4
_COLOCATED_STEPS = 6
_COLOCATED_WARM = 2  # the workers' first batches


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a step, steps of the lake, runs of each kind."""

    step_bytes: int = 36 * MIB
    steps: int = 72
    rounds: int = 3
    seconds_max: float = 60.0

    @classmethod
    def quick(cls) -> Size:
        return cls(step_bytes=2 * MIB, steps=12, rounds=1, seconds_max=5.0)


class Training:
    """One kind of preprocessing: its lake, its raw samples."""

    def __init__(self, bed: Bed, kind: str, size: Size) -> None:
        self._bed = bed
        self._kind = kind
        self._size = size
        self._directory = bed.fresh(kind)
        self.work: Work = WORKS[kind](self._directory)
        self.work.prepare()
        self.batch = size.step_bytes // self.work.sample_bytes
        self.step_bytes = self.batch * self.work.sample_bytes
        bed.report.say(f"{self.work.name}: {size.steps} steps of {self.batch} samples")
        self._url = bed.lake(kind, 1, self._batches(), ext=".npy")
        self.bandwidth = self._measure()

    def _batches(self) -> Iterator[list[bytes]]:
        """A few batches over and over: the store does not know."""
        made = []
        for number in range(_DISTINCT):
            out = io.BytesIO()
            np.save(out, batch(self.work, range(number * self.batch, (number + 1) * self.batch)).numpy())
            made.append(out.getvalue())
        return ([body] for body in itertools.islice(itertools.cycle(made), self._size.steps))

    def _measure(self) -> float:
        """Bytes per second that the store delivers to parallel GETs."""
        keys = data_objects(self._url)
        order = {"bucket": servers.BUCKET, "keys": keys, "bytes": self.step_bytes, "threads": THREADS}
        seconds = [self._bed.probe(kind="boto3", **order)["seconds"] for _ in range(2)]
        return self.step_bytes / median([value for run in seconds for value in run])

    def mount(self, share: float) -> dict[str, float]:
        steps = self._size.steps
        cache = max(64 * MIB, 16 * self.step_bytes * 2) // MIB
        with self._bed.mounted(self._url, "--cache-size", f"{cache}M") as mount:
            paths = [str(mount.path(step, 0)) for step in range(steps)]
            before = mount.cpu_s()
            found = self._loop(
                "mount", share, steps, WARM_STEPS if steps > 2 * WARM_STEPS else 2, paths=paths
            )
            data = mount.data()
            found |= {"daemon CPU-s per GB": (mount.cpu_s() - before) / (steps * self.step_bytes / 1e9)}
            return found | {"primed share": data["primed_files"] / steps}

    def colocated(self, share: float) -> dict[str, float]:
        return self._loop(
            "colocated",
            share,
            _COLOCATED_STEPS + _COLOCATED_WARM,
            _COLOCATED_WARM,
            work=self._kind,
            directory=str(self._directory),
        )

    def _loop(self, side: str, share: float, steps: int, warm: int, **order: object) -> dict[str, float]:
        order |= {"side": side, "steps": steps, "warm": warm, "workers": WORKERS, "batch": self.batch}
        order |= {
            "compute_s": self.step_bytes / (share * self.bandwidth),
            "seconds_max": self._size.seconds_max,
        }
        touch_memory(16 * self.step_bytes)
        ticks = cpu_ticks()
        done = run(program("bench_train.training_loop", json.dumps(order)))
        busy = busy_share(ticks, cpu_ticks())
        found = json.loads(done.stdout)
        waits, totals = found["waits"], found["totals"]
        return {
            "stall": sum(waits) / sum(totals),
            "machine busy": busy,
            "median wait s": median(waits),
            "longest wait s": max(waits),
            "median step s": median(totals),
        }


def stall(
    bed: Bed, kinds: tuple[str, ...], shares: tuple[float, ...], size: Size, *, colocated: bool
) -> None:
    """A row per kind and share; every side `rounds` times, in turns (the colocated one, which is slow, once)."""
    for kind in kinds:
        training = Training(bed, kind, size)
        bandwidth = training.bandwidth / 1e6
        bed.report.add(Row(f"{training.work.name}: the store's bandwidth", f"{bandwidth:,.0f} MB/s"))
        found: dict[tuple[str, float], list[dict[str, float]]] = {}
        for number in range(size.rounds):
            for share in shares:
                found.setdefault(("mount", share), []).append(training.mount(share))
                if colocated and number == 0:
                    found.setdefault(("colocated", share), []).append(training.colocated(share))
        for share in shares:
            _judge(bed, training, share, found)
        bed.report.figures[f"stall, {kind}"] = {
            "bandwidth": training.bandwidth,
            "step bytes": training.step_bytes,
            "runs": [{"side": side, "share": share, "runs": runs} for (side, share), runs in found.items()],
        }


def _judge(
    bed: Bed, training: Training, share: float, found: dict[tuple[str, float], list[dict[str, float]]]
) -> None:
    runs = found["mount", share]
    ours, other = median([each["stall"] for each in runs]), found.get(("colocated", share))
    text = f"colocated {median([each['stall'] for each in other]):.1%}; " if other else ""
    text += f"all cores {median([each['machine busy'] for each in runs]):.0%} busy, "
    text += f"daemon {median([each['daemon CPU-s per GB'] for each in runs]):.2f} CPU-s per GB"
    what = f"stall at {share:.0%} of the store's bandwidth, {training.work.name}"
    if share == 0.8:
        bed.report.add(at_most(1, what, f"{ours:.2%}", text, 100 * ours, "%"))
    else:
        bed.report.add(Row(what, f"{ours:.2%}", text))
