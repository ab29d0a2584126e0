"""Two loads balanced at once, over planned steps of text and images, beside one cost and rows as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.report import Report, Row, at_most
from bench_plan.lengths import Integers
from bench_plan.planned import rules
from stepfs_producer.plan.balance import Method, Over, deal
from stepfs_producer.plan.cost import TOKENS, Cost
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Packing, Rules
from stepfs_producer.plan.samples import Ahead, Piece
from stepfs_producer.plan.step import StepPlan

LENGTH = 8192
PRICE = 8000  # of a patch of the encoder, beside 6 × 4096 of a token of the backbone
PATCHES_A_TOKEN = 4
PATCHES_MAX = 4096  # of an image, as plans have it by default
BOUNDS = {(8, 8): 1.015, (64, 8): 1.015, (64, 4): 1.05}
STEPS = 3


def run(report: Report, *, quick: bool) -> None:
    cost = Cost(6 * 4096, 1, prices=(("pixels", PRICE),))
    ways: dict[str, dict[str, Any]] = {
        "two loads": {"loads": (TOKENS, "pixels")},
        "the backbone's cost": {"cost": Cost(6 * 4096, 1)},
        "the sum of both": {},
        "as they come": {"method": Method.NONE, "packing": Packing.BEST_FIT},
    }
    for (ranks, rows), bound in list(BOUNDS.items())[: 1 if quick else None]:
        found = {}
        for name, more in ways.items():
            chosen = rules(
                {"s": 1},
                LENGTH,
                ranks,
                micro_batch_tokens=rows * LENGTH,
                columns=("pixels",),
                **({"cost": cost} | more),
            )
            plans = list(planned(chosen, 1 if quick else STEPS))
            found[name] = np.array([slowest(plan) for plan in plans]).mean(axis=0), pace(plans)
        report.figures.setdefault("loads", []).append(
            [ranks, rows, {name: one.tolist() for name, (one, _) in found.items()}]
        )
        ours = found["two loads"][0]
        beside = ", ".join(
            f"{name} {one[0]:.3f}, {one[1]:.3f}" for name, (one, _) in found.items() if name != "two loads"
        )
        what = f"slowest ÷ mean, backbone and encoder, {ranks} ranks × {rows} rows of 8k"
        report.add(at_most(bound, what, f"{ours[0]:.3f}, {ours[1]:.3f}", beside, float(ours.max())))
        gain = found["as they come"][1] / found["two loads"][1]
        what = f"a step of text and images by balance alone, {ranks} × {rows}: ranks meet in encoder and backbone"
        report.add(Row(what, "two loads", "rows as they come", gain))
    seconds = [dealing_s(seed) for seed in range(5)]
    report.add(
        at_most(
            60,
            "dealing 512 rows by two loads, ms of CPU",
            f"{1000 * min(seconds):.0f}",
            "",
            1000 * min(seconds),
        )
    )
    one = [dealing_s(seed, several=False) for seed in range(5)]
    report.add(Row("dealing 512 rows by one cost, ms of CPU", f"{1000 * min(one):.0f}", "", None))


def records(count: int) -> tuple[Integers, Integers]:
    """Tokens and patches: half of the documents have an image of a lognormal size, in front of their text."""
    draw = np.random.default_rng(5)
    text = np.exp(draw.normal(6, 1.2, count)).astype(np.int64) + 1
    images = (np.exp(draw.normal(7, 0.9, count)) * (draw.random(count) < 0.5)).astype(np.int64)
    patches = np.minimum(images, PATCHES_MAX) // PATCHES_A_TOKEN * PATCHES_A_TOKEN
    return np.minimum(text, 4000) + patches // PATCHES_A_TOKEN, patches


def planned(chosen: Rules, count: int) -> Iterator[StepPlan]:
    tokens, patches = records(3 * chosen.ranks * chosen.micro_batch_tokens * count // 700)
    planner = Planner(chosen)
    state = planner.begin()
    for _ in range(count):
        taken = state.sources["s"].taken
        whole = Piece(0, 0, 0, len(tokens), taken, tokens[taken:], (1, 0, 0), patches[taken:, None])
        plan = planner.next(state, {"s": Ahead((whole,), ended=True)})
        assert isinstance(plan, StepPlan)
        yield plan
        state = plan.after


def loads_of(plan: StepPlan) -> Integers:
    """[loads, ranks], also of a plan that balances something else."""
    ranks = plan.shape[0]
    found = np.zeros((2, ranks), np.int64)
    tokens, patches = plan.spans[:, 4], plan.spans[:, -1]
    np.add.at(found[0], plan.spans[:, 0], 6 * 4096 * tokens + tokens * tokens)
    np.add.at(found[1], plan.spans[:, 0], patches)
    return found


def slowest(plan: StepPlan) -> tuple[float, float]:
    backbone, encoder = (float(load.max() / load.mean()) for load in loads_of(plan))
    return backbone, encoder


def pace(plans: list[StepPlan]) -> float:
    """Cost of steps whose ranks wait for each other in the encoder and in the backbone, per cost of their tokens."""
    waited = sum(float(backbone.max() + PRICE * encoder.max()) for backbone, encoder in map(loads_of, plans))
    return waited / sum(plan.tokens for plan in plans)


def dealing_s(seed: int, *, several: bool = True) -> float:
    draw = np.random.default_rng(seed)
    backbone = 6 * 4096 * LENGTH + (np.exp(draw.normal(6.5, 1.1, (512, 8))) ** 2).sum(axis=1).astype(np.int64)
    encoder = np.minimum(np.exp(draw.normal(7, 0.8, (512, 6))), 8192).astype(np.int64).sum(axis=1)
    costs = np.stack([backbone, encoder], axis=1) if several else backbone
    began = time.process_time()
    deal(costs, ranks=64, micro_batches=1, method=Method.AUTO, over=Over.MICRO_BATCHES)
    return time.process_time() - began
