"""One plan read by trainers of other sizes: how even their ranks are."""

from __future__ import annotations

from bench.report import Report, Row, at_most
from bench_plan.lengths import KINDS
from bench_plan.planned import rules, slowdown, steps
from stepfs_producer.plan.balance import Over
from stepfs_producer.plan.cost import Cost

RANKS, MICRO = 64, 8
BOUNDS = {16: 1.01, 32: 1.01, 64: 1.01, 128: 1.05}  # of 8k; larger sizes are reported
STEPS = 4


def run(report: Report, *, quick: bool) -> None:
    for length in (8192,) if quick else (8192, 16384):
        chosen = rules(
            {"lognormal": 1},
            length,
            RANKS,
            micro_batches=MICRO,
            micro_batch_tokens=length,
            cost=Cost.of_hidden_size(4096),
            over=Over.MICRO_BATCHES,
        )
        lengths = {"lognormal": KINDS["lognormal"](1, 200_000)}
        costs = [plan.costs for plan in steps(chosen, lengths, 1 if quick else STEPS)]
        for data in (16, 32, 64, 128, 256, 512):
            read = [each.reshape(data, -1) for each in costs]  # units in order, as a mesh of this size reads them
            mean, meeting = (sum(slowdown(each, meet=meet) for each in read) / len(read) for meet in (False, True))
            what = f"slowest ÷ mean, dp {RANKS} × {MICRO} of {length // 1024}k read as dp {data}"
            row = Row(what, f"{mean:.4f}", f"{meeting:.3f} where ranks meet at every micro-batch", mean)
            judged = length == 8192 and data in BOUNDS
            report.add(at_most(BOUNDS[data], what, row.ours, row.against, mean) if judged else row)
            report.figures.setdefault("elastic", []).append([length, data, mean, meeting])
