"""How far the share of a source is from its schedule, over the worst 1000 steps in a row."""

from __future__ import annotations

import numpy as np

from bench.report import Report, at_most
from bench_plan.lengths import Integers, lognormal
from bench_plan.planned import rules, shares, steps
from stepfs_producer.plan.draw import ONE, MixEntry

WINDOW = 1000
RANKS = 8
ROWS = 8  # of a rank
LENGTH = 4096
BOUND_PERCENT = 0.02


def run(report: Report, *, quick: bool) -> None:
    count = WINDOW + (50 if quick else 500)
    for sources in (3, 64) if quick else (3, 64, 306):
        for kind in ("ramped",) if quick else ("static", "staged", "ramped"):
            ours, random = errors(sources, kind, count)
            what = f"share error, {sources} sources, {kind}, any {WINDOW} steps"
            report.add(at_most(BOUND_PERCENT, what, f"{ours:.4f} %", f"random draws {random:.3f} %", ours, "%"))
            report.figures.setdefault("mix", {})[f"{sources} {kind}"] = {"ours": ours, "random": random}


def errors(sources: int, kind: str, count: int) -> tuple[float, float]:
    """Percentage points of the worst source: ours, and of as many tokens in random draws."""
    lengths = {f"s{number:03}": lognormal(number, 20_000) for number in range(sources)}
    first = {name: number % 7 + 1 for number, name in enumerate(lengths)}
    then = {name: (number * 3) % 7 + 1 for number, name in enumerate(lengths)}
    entries = [MixEntry(0, shares(first))]
    if kind != "static":
        entries.append(MixEntry(count // 2, shares(then), ramp=kind == "ramped"))
    chosen = rules(first, LENGTH, RANKS, entries=entries, micro_batch_tokens=ROWS * LENGTH)
    kept = np.zeros((count, sources), np.int64)
    wanted = np.zeros((count, sources))
    for step, plan in enumerate(steps(chosen, lengths, count)):
        kept[step] = np.bincount(plan.spans[:, 5], plan.spans[:, 4], sources).astype(np.int64)
        wanted[step] = np.array(plan.shares) / ONE * plan.tokens
    return worst(kept, wanted), worst(at_random(wanted, lengths), wanted)


def at_random(wanted: np.ndarray, lengths: dict[str, Integers]) -> Integers:
    """Tokens of each source if every sample's source is drawn by lot."""
    random = np.random.default_rng(5)
    cut = {name: np.minimum(tokens, LENGTH) for name, tokens in lengths.items()}
    mean = np.array([tokens.mean() for tokens in cut.values()])
    drawn = np.zeros(wanted.shape, np.int64)
    for step, row in enumerate(wanted):
        chances = row / mean
        counts = random.multinomial(round(row.sum() / mean.mean()), chances / chances.sum())
        drawn[step] = [random.choice(tokens, n).sum() for tokens, n in zip(cut.values(), counts, strict=True)]
    return drawn


def worst(kept: np.ndarray, wanted: np.ndarray) -> float:
    """Percentage points by which a source's share of any `WINDOW` steps is off."""
    most = 0.0
    for first in range(len(kept) - WINDOW + 1):
        here = slice(first, first + WINDOW)
        off = kept[here].sum(axis=0) / kept[here].sum() - wanted[here].sum(axis=0) / wanted[here].sum()
        most = max(most, float(np.abs(off).max()) * 100)
    return most
