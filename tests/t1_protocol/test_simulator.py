"""A thousand clusters under fire, and the proof that each is a function of its seed."""

from __future__ import annotations

from collections import Counter

import pytest
from cluster import simulate
from sweep import sweep

SEEDS = range(1000)

# What the seeds must have met to mean anything: how often, at least, over all of them.
_MET = {
    "data commits": 5000,
    "epoch commits": 2000,
    "seal commits": 100,
    "kills": 1000,
    "freezes": 500,
    "fenced": 100,
    "landed late": 200,
    "zombie slots": 100,
    "reclaims": 1500,
    "deleted data": 5000,
    "withdrawn": 100,
    "reclaims cut short": 10,
}


@pytest.mark.timeout(600)
def test_a_thousand_seeds_hold_every_invariant() -> None:
    met: Counter[str] = Counter()
    for outcome in sweep(SEEDS):
        assert not outcome.broken, f"scripts/simulate --seed {outcome.seed} --trace: {outcome.broken}"
        met += outcome.counts
    assert {what: met[what] for what, least in _MET.items() if met[what] < least} == {}


@pytest.mark.logs(".*")
def test_a_seed_replays_to_the_same_trace() -> None:
    """Twice in this process, and once in a process with another hash seed, after other seeds."""
    seeds = range(40, 52)
    here = [simulate(seed).digest for seed in seeds]
    assert [simulate(seed).digest for seed in reversed(seeds)] == here[::-1]
    assert [outcome.digest for outcome in sweep(seeds, processes=1)] == here
    assert len(set(here)) == len(here)
