"""How even the ranks of a step are, what that gains over rows as they come, and how full the rows are."""

from __future__ import annotations

from bench.report import Report, Row, at_least, at_most
from bench_plan.lengths import KINDS
from bench_plan.planned import rules, slowdown, steps
from stepfs_producer.plan.balance import Method, Over
from stepfs_producer.plan.cost import Cost
from stepfs_producer.plan.rules import Packing

ROWS = 8  # of a rank
STEP_TOKENS = 1 << 25  # of all steps that are measured, but at least one step
STEPS_MAX = 4
COSTS = {"7B": Cost.of_hidden_size(4096), "quadratic": Cost(0, 1)}
GAINS = {4096: 1.7, 8192: 2.6, 16384: 3.0}
FILLS = {1024: 0.999, 64: 0.985, 16: 0.97, 8: 0.95}


def run(report: Report, *, quick: bool) -> None:
    ranks = (8, 64) if quick else (8, 64, 512)
    figures = report.figures.setdefault("balance", [])
    for over, bound in ((Over.RANKS, 1.02), (Over.MICRO_BATCHES, 1.05)):
        meet = over is Over.MICRO_BATCHES
        for length in GAINS:
            found = {
                (kind, count): (
                    measured(kind, length, count, over),
                    as_they_come(kind, length, count, "7B", meet=meet),
                )
                for kind in KINDS
                for count in ranks
            }
            figures += [[str(over), length, kind, count, *both] for (kind, count), both in found.items()]
            worst = max(found, key=lambda one: found[one][0])
            before = max(plain for _, plain in found.values())
            what = f"slowest ÷ mean, 7B, {over}, {length // 1024}k, {ranks[0]}…{ranks[-1]} ranks"
            ours = f"{found[worst][0]:.3f} ({worst[0]}, {worst[1]} ranks)"
            report.add(at_most(bound, what, ours, f"{before:.2f} as they come", found[worst][0]))
    for length, bound in GAINS.items():
        for name, cost in COSTS.items():
            plain = as_they_come("lognormal", length, ranks[-1], name, meet=True)
            even = measured("lognormal", length, ranks[-1], Over.MICRO_BATCHES, cost)
            what = f"gain, {name}, {length // 1024}k, {ranks[-1]} ranks, per micro-batch"
            row = at_least(bound, what, f"{even:.3f}", f"{plain:.2f} as they come", plain / even)
            report.add(row if name == "quadratic" else Row(what, row.ours, row.against, row.ratio))
    fill(report, quick=quick)
    several_lengths(report, quick=quick)


def measured(kind: str, length: int, ranks: int, over: Over, cost: Cost = COSTS["7B"]) -> float:
    """Slowest ÷ mean of planned steps, on average."""
    chosen = rules({kind: 1}, length, ranks, micro_batches=ROWS, micro_batch_tokens=length, cost=cost, over=over)
    meet = over is Over.MICRO_BATCHES
    plans = list(steps(chosen, {kind: KINDS[kind](1, 200_000)}, steps_for(ranks, length)))
    return sum(slowdown(plan.costs, meet=meet) for plan in plans) / len(plans)


def steps_for(ranks: int, length: int) -> int:
    return min(max(STEP_TOKENS // (ranks * ROWS * length), 1), STEPS_MAX)


def as_they_come(kind: str, length: int, ranks: int, cost: str, *, meet: bool) -> float:
    chosen = rules(
        {kind: 1},
        length,
        ranks,
        micro_batches=ROWS,
        micro_batch_tokens=length,
        cost=COSTS[cost],
        packing=Packing.CONCAT,
        method=Method.NONE,
    )
    plans = list(steps(chosen, {kind: KINDS[kind](1, 200_000)}, steps_for(ranks, length)))
    return sum(slowdown(plan.costs, meet=meet) for plan in plans) / len(plans)


def fill(report: Report, *, quick: bool) -> None:
    for rows, bound in FILLS.items():
        count = (20 if rows < 1024 else 3) if quick else (200 if rows < 1024 else 20)
        lengths = {"lognormal": KINDS["lognormal"](2, 400_000)}
        packed = list(steps(rules({"lognormal": 1}, 4096, rows), lengths, count))
        cut = list(steps(rules({"lognormal": 1}, 4096, rows, packing=Packing.CONCAT), lengths, count))
        fills = [plan.tokens / plan.room for plan in packed]
        mean = sum(fills) / count
        report.figures.setdefault("fill", {})[rows] = {"mean": mean, "least": min(fills)}
        report.add(
            at_least(
                bound,
                f"fill, best fit, {rows} rows of 4k",
                f"{mean:.4f}, least {min(fills):.3f}",
                f"concat cuts {sum(plan.cut for plan in cut) / count:.0f} documents a step",
                mean,
                "",
            )
        )


def several_lengths(report: Report, *, quick: bool) -> None:
    """Sources of 4k, 8k and 32k in rows of 32k, beside the same documents in one length."""
    row, of_sources = 32768, {"code": 4096, "lognormal": 8192, "prose": 32768}
    lengths = {name: 32 * KINDS[name](3, 50_000) for name in of_sources}  # many of them longer than a row
    count = 10 if quick else 50
    found = {}
    for ranks, rows in ((16, 1), (8, 8), (64, 8)):
        for own in (of_sources, {}):
            chosen = rules(
                dict.fromkeys(of_sources, 1),
                row,
                ranks,
                micro_batches=rows,
                micro_batch_tokens=row,
                cost=COSTS["7B"],
                of_sources=own,
            )
            plans = list(steps(chosen, lengths, max(count // (ranks * rows // 16), 2)))
            fills = sum(plan.tokens for plan in plans) / sum(plan.room for plan in plans)
            even = sum(slowdown(plan.costs, meet=True) for plan in plans) / len(plans)
            found[ranks, rows, bool(own)] = (fills, even)
    report.figures["several lengths"] = [[*key, *values] for key, values in found.items()]
    for (ranks, rows, shorter), (fills, even) in found.items():
        if shorter:
            one_fill, one_even = found[ranks, rows, False]
            report.add(
                at_least(
                    0.97,
                    f"fill, 4k / 8k / 32k in rows of 32k, {ranks} ranks × {rows} rows",
                    f"{fills:.4f}; slowest ÷ mean {even:.3f}",
                    f"one length {one_fill:.4f}; {one_even:.3f}",
                    fills,
                    "",
                )
            )
