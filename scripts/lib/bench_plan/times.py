"""What it costs to plan a step: CPU milliseconds of the fastest of several turns. And how soon a run has its first step.

Other processes slow a turn down even in CPU time, as they share caches and cores; nothing makes one faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.machine import BIN, drop_caches
from bench.machine import run as run_command
from bench.report import Report, at_most, load
from bench_plan.corpora import parquet_plan, write_parquet
from bench_plan.lengths import lognormal
from bench_plan.planned import ahead, rules
from stepfs_producer.plan.balance import Over, differencing
from stepfs_producer.plan.cost import CostModel
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.step import StepPlan

RANKS = 512
SAMPLES = 64  # of a rank


def run(report: Report, directory: Path, *, quick: bool) -> None:
    turns = 5 if quick else 15
    costs = lognormal(3, RANKS * SAMPLES)
    took_ms = min(cpu_ms(lambda: differencing(costs, RANKS)) for _ in range(turns))
    report.add(at_most(10, f"Karmarkar–Karp, {RANKS} × {SAMPLES}", f"{took_ms:.1f} ms of CPU", "", took_ms, "ms"))
    report.figures["time"] = {"karmarkar_karp_ms": took_ms}
    for sources in (3, 64, 306):
        planned_ms, samples = one_step(sources, turns)
        what = f"planning {samples} samples of {sources} sources for {RANKS} ranks"
        per = planned_ms * RANKS * SAMPLES / samples
        ours = f"{planned_ms:.0f} ms of CPU"
        report.add(at_most(120, what, ours, f"{per:.0f} ms for {RANKS} × {SAMPLES}", per, "ms"))
        report.figures["time"][f"{sources} sources"] = planned_ms
    first_steps(report, directory, quick=quick)


def first_steps(report: Report, directory: Path, *, quick: bool) -> None:
    """From the start of the process to the first commit, page cache dropped."""
    paths = write_parquet(directory / "corpora", 8 if quick else 64, 10)
    for sources, bound in ((8, 10),) if quick else ((64, 10), (306, 40)):
        plan = directory / f"{sources}.yaml"
        plan.write_text(parquet_plan(paths, sources, "8MiB", 65536))
        cold = drop_caches()
        began = time.monotonic()
        lake = f"file://{directory}/lake-{sources}"
        run_command([str(BIN / "stepfs-produce"), "run", str(plan), lake, "--limit-steps", "1"])
        took_s = time.monotonic() - began
        report.figures["time"][f"first step, {sources} sources"] = {"seconds": took_s, "load": load()}
        what = f"first step, {sources} Parquet sources, {'cold' if cold else 'files in page cache'}"
        report.add(at_most(bound, what, f"{took_s:.1f} s", f"load {load()}", took_s, "s"))


def one_step(sources: int, turns: int) -> tuple[float, int]:
    """CPU milliseconds, and how many samples the step took."""
    lengths = {f"s{number:03}": lognormal(number, 20_000) for number in range(sources)}
    chosen = rules(
        dict.fromkeys(lengths, 1),
        4096,
        RANKS,
        micro_batch_tokens=11 * 4096,
        cost=CostModel.of_hidden_size(4096),
        over=Over.RANKS,
    )
    planner = Planner(chosen)
    state = planner.begin()
    known = ahead(state, lengths, dict.fromkeys(lengths, 60_000 // sources + 100), {})
    took = []
    spans = 0
    for _ in range(turns):
        began = time.process_time()
        plan = planner.next(state, known)
        took.append((time.process_time() - began) * 1000)
        assert isinstance(plan, StepPlan)
        spans = len(plan.spans)
    return min(took), spans


def cpu_ms(work: Callable[[], np.ndarray]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000
