"""Clusters under fire, others every day: 30, under `--slow` 900; and the proof that each is a function of its seed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import UTC, date, datetime

import pytest
from cluster import simulate
from draw import scenario
from sweep import sweep

SEEDS = 900
PART = SEEDS // 30  # CI's; all of them under --slow
_FIRST = "STEPFS_SIMULATE_FIRST"

# What all seeds must have met to mean anything: how often, at least.
_MET = {
    "data commits": 4000, "epoch commits": 1800, "seal commits": 54, "kills": 1000, "freezes": 400, "fenced": 54,
    "landed late": 120, "zombie slots": 80, "reclaims": 1200, "deleted data": 4800, "withdrawn": 54,
    "reclaims cut short": 80, "watched changes": 480, "damage reported": 6, "forks": 7, "rotten log": 2,
    "rotten snapshot": 2,
}  # fmt: skip


def first_seed(today: date) -> int:
    """Every day its own stretch of seeds, far above those that people type."""
    return 10_000_000 + today.toordinal() * SEEDS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [PART, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_the_seeds_of_today_hold_every_invariant(count: int) -> None:
    first = int(os.environ.get(_FIRST) or first_seed(datetime.now(UTC).date()))
    again = f"again: scripts/simulate --first {first} --seeds {count}, or {_FIRST}={first} scripts/test"
    sys.stdout.write(f"seeds {first} to {first + count - 1}; {again}\n")
    met: Counter[str] = Counter()
    for outcome in sweep(range(first, first + count)):
        assert not outcome.broken, f"scripts/simulate --seed {outcome.seed} --trace: {outcome.broken}; {again}"
        met += outcome.counts
    wanted = _MET if count == SEEDS else {}
    missed = {what: met[what] for what, least in wanted.items() if met[what] < least}
    assert not missed, f"the seeds did not meet enough of {missed}; {again}"


def test_no_two_days_share_a_seed() -> None:
    monday, tuesday = date(2026, 11, 23), date(2026, 11, 24)
    assert first_seed(tuesday) - first_seed(monday) == SEEDS


@pytest.mark.logs(".*")
@pytest.mark.timeout(300)
def test_a_seed_replays_to_the_same_trace() -> None:
    """Twice in this process, and once in a process with another hash seed, after other seeds."""
    seeds = range(40, 52)
    here = [simulate(seed).digest for seed in seeds]
    assert [simulate(seed).digest for seed in reversed(seeds)] == here[::-1]
    assert [outcome.digest for outcome in sweep(seeds, processes=1)] == here
    assert len(set(here)) == len(here)


def test_some_of_every_kind_take_part() -> None:
    """What the simulator knows is drawn, and a lake is shared by one to sixteen producers."""
    plans = [scenario(seed) for seed in range(2000)]
    crowds = Counter(len(plan.producers) for plan in plans)
    assert set(range(1, 17)) <= set(crowds)
    assert sum(count for producers, count in crowds.items() if producers <= 3) > 1500, "most are small"
    for met in (
        [plan for plan in plans if plan.watched],
        [plan for plan in plans if plan.forks],
        [plan for plan in plans if plan.rots],
        [plan for plan in plans if plan.lying],
        [plan for plan in plans if plan.page],
        [plan for plan in plans if plan.skewed],
        [plan for plan in plans if any(trainer.one_by_one for trainer in plan.trainers)],
        [plan for plan in plans if any(life.locked_out_s for one in plan.producers for life in one.lives)],
    ):
        assert len(met) > 50
