"""What it costs to plan a step: CPU milliseconds of the fastest of several turns.

Other processes slow a turn down even in CPU time, as they share caches and cores; nothing makes one faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench.report import Report, at_most
from bench_plan.lengths import lognormal
from bench_plan.planned import ahead, rules
from stepfs_producer.plan.balance.deal import Over
from stepfs_producer.plan.balance.differencing import differencing
from stepfs_producer.plan.cost import Cost
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.step import StepPlan

RANKS = 512
SAMPLES = 64  # of a rank


def run(report: Report, *, quick: bool) -> None:
    turns = 5 if quick else 15
    costs = lognormal(3, RANKS * SAMPLES)
    took_ms = min(cpu_ms(lambda: differencing(costs, RANKS)) for _ in range(turns))
    report.add(
        at_most(10, f"Karmarkar–Karp, {RANKS} × {SAMPLES}", f"{took_ms:.1f} ms of CPU", "", took_ms, "ms")
    )
    report.figures["time"] = {"karmarkar_karp_ms": took_ms}
    for sources in (3, 64, 306):
        planned_ms, samples = one_step(sources, turns)
        what = f"planning {samples} samples of {sources} sources for {RANKS} ranks"
        per = planned_ms * RANKS * SAMPLES / samples
        ours = f"{planned_ms:.0f} ms of CPU"
        report.add(at_most(120, what, ours, f"{per:.0f} ms for {RANKS} × {SAMPLES}", per, "ms"))
        report.figures["time"][f"{sources} sources"] = planned_ms


def one_step(sources: int, turns: int) -> tuple[float, int]:
    """CPU milliseconds, and how many samples the step took."""
    lengths = {f"s{number:03}": lognormal(number, 20_000) for number in range(sources)}
    chosen = rules(
        dict.fromkeys(lengths, 1),
        4096,
        RANKS,
        micro_batch_tokens=11 * 4096,
        cost=Cost.of_hidden_size(4096),
        over=Over.RANKS,
    )
    planner = Planner(chosen)
    state = planner.begin()
    known = ahead(state, lengths, dict.fromkeys(lengths, 60_000 // sources + 100))
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
