"""What the pacing comes to with many producers: few lost attempts, and nobody who waits much longer than the others.

`pacemodel` is the model; T is the interval that the pacing's own model names.
"""

from __future__ import annotations

import random

import pytest
from pacemodel import Model, Result, around

from stepfs_producer.commit.pace import LOAD, Pacer, interval_s

TEN_MS = around(0.01)


def simulate(count: int, *, seconds: float, period_s: float = 0.3) -> Result:
    return Model([period_s] * count, TEN_MS, delay_max_s=60.0, seed=count).run(seconds)


def fleet(count: int, exposure_s: float, *, turns: int, crowded_at: int | None = None) -> tuple[Result, float]:
    """Producers that start together with the default `max_delay` and never run out of batches; T."""
    natural_s = interval_s(count - 1, exposure_s)
    model = Model(
        [natural_s / 4] * count, around(exposure_s), seed=count, start_together=True, crowded_at=crowded_at,
    )  # fmt: skip
    return model.run(turns * natural_s), natural_s


@pytest.mark.parametrize(
    ("count", "seconds"), [(2, 60), (4, 70), (16, 200), (64, 400), pytest.param(256, 400, marks=pytest.mark.nightly)]
)
def test_few_attempts_are_lost_whatever_the_number_of_producers(count: int, seconds: float) -> None:
    result = simulate(count, seconds=seconds)
    assert result.lost_share <= 0.25
    few_commits_each = count == 256
    assert result.spread <= (1.5 if few_commits_each else 1.2), "nobody is starved, nobody is favoured"


SIZES = [
    (16, 40),
    (100, 40),
    pytest.param(256, 12, marks=pytest.mark.nightly),
    pytest.param(1000, 12, marks=[pytest.mark.nightly, pytest.mark.timeout(600)]),
]


@pytest.mark.parametrize("exposure_s", [0.01, 0.05, 0.1])
@pytest.mark.parametrize(("count", "turns"), SIZES)
def test_nobody_starves_among_producers_that_start_together(count, turns, exposure_s):
    result, natural_s = fleet(count, exposure_s, turns=turns)
    assert result.lost_share <= 0.25
    assert result.spread <= 2.0
    assert result.wait_s(1.0) <= 2 * natural_s
    assert result.wait_s(1.0) <= 4 * result.wait_s(0.5), "the unluckiest waits a small multiple of the usual"
    assert result.started_s <= 3 * natural_s
    assert result.start_attempts <= 12 * count


@pytest.mark.parametrize("count", [16, 100])
def test_everybody_crowded_is_paced_like_nobody_crowded(count: int) -> None:
    result, natural_s = fleet(count, 0.05, turns=40, crowded_at=1)
    assert result.lost_share <= 0.3
    assert result.wait_s(1.0) <= 2 * natural_s


def test_one_crowded_producer_among_trickles_commits_more_often() -> None:
    periods = [0.1, *[20.0] * 30]
    heavy = {
        crowded_at: Model(periods, around(0.05), seed=1, crowded_at=crowded_at).run(2000).nodes[0].commits
        for crowded_at in (None, 1)
    }
    assert heavy[1] > 1.5 * heavy[None]


@pytest.mark.parametrize(("near", "far", "times"), [(90, 10, 10), (50, 50, 10), (15, 1, 4)])
def test_producers_far_from_the_store_are_not_starved(near: int, far: int, times: int) -> None:
    exposures = [around(0.05)] * near + [around(0.05 * times)] * far
    natural_s = interval_s(near + far - 1, 0.05)
    periods = [natural_s / 4] * (near + far)
    result = Model(periods, exposures, seed=1, start_together=True).run(30 * natural_s)
    commits = [node.commits for node in result.nodes]
    assert min(commits[near:]) * 8 >= max(commits[:near])
    near_lost = sum(node.lost for node in result.nodes[:near])
    assert near_lost <= 0.25 * (near_lost + sum(commits[:near])), "nor do they cost the others their attempts"
    far_lost = sum(node.lost for node in result.nodes[near:])
    assert far_lost <= 0.9 * (far_lost + sum(commits[near:]))


def test_one_producer_alone_commits_back_to_back() -> None:
    result = simulate(1, seconds=30, period_s=0.001)
    assert result.lost_share == 0
    assert result.wait_s(0.99) < 5 * 0.02


@pytest.mark.parametrize("count", [4, 16, 64])
def test_latency_grows_with_the_interval_of_the_model_and_no_more(count: int) -> None:
    result = simulate(count, seconds=100)
    assert result.wait_s(0.99) < 1.25 * (count - 1) * 0.01 / LOAD + 0.15


def test_a_slower_store_makes_commits_rarer_and_keeps_them_flowing() -> None:
    """τ rises tenfold half-way: the share of lost attempts stays, everything appended is still committed."""

    def exposure(now: float, rng: random.Random) -> float:
        return TEN_MS(now, rng) * (10 if now > 200 else 1)

    result = Model([0.3] * 16, exposure, delay_max_s=60.0, seed=16).run(600)
    assert result.lost_share <= 0.25
    assert all(len(node.pending) < 60 for node in result.nodes)


def test_losers_that_the_server_keeps_waiting_do_not_stop_the_rest() -> None:
    """One in ten attempts takes a second, as with a server that parks the losers of a race."""

    def exposure(now: float, rng: random.Random) -> float:
        return 1.0 if rng.random() < 0.1 else TEN_MS(now, rng)

    result = Model([0.3] * 16, exposure, delay_max_s=60.0, seed=16).run(200)
    assert result.wait_s(0.5) < 1.5
    assert all(node.pacer.interval_s < 5 for node in result.nodes)


def test_an_outage_of_a_minute_slows_a_hundred_producers_for_minutes_only() -> None:
    def exposure(now: float, rng: random.Random) -> float:
        return 15.0 if 300 < now < 360 else around(0.05)(now, rng)

    result = Model([5.0] * 100, exposure, seed=1).run(1200)
    late = [since for node in result.nodes for since in node.pending]
    assert 1200 - min(late) < 60, "long after, everybody is at the usual pace"
    assert result.wait_s(1.0) < 360


def test_hazard_09_a_trickle_among_heavy_producers_meets_the_bound() -> None:
    periods = [0.02] * 15 + [20.0]
    trickle = Model(periods, TEN_MS, delay_max_s=2.0, seed=1).run(200).nodes[-1]
    assert trickle.waits
    assert max(trickle.waits) < 2.0 + 0.5


def test_when_most_producers_leave_the_rest_speeds_up() -> None:
    model = Model([0.1] * 32, TEN_MS, delay_max_s=60.0, seed=3)
    model.run(60)
    crowded_s = model.nodes[0].pacer.interval_s
    for node in model.nodes[2:]:
        node.gone = True
    model.run(160)
    assert model.nodes[0].pacer.interval_s < crowded_s / 5


def test_mutant_a_bound_that_wins_over_the_pace_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pacer, "gives_way", False)
    result, _ = fleet(100, 0.05, turns=20)
    assert result.lost_share > 0.4


def test_mutant_a_log_as_short_as_a_minute_hides_most_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pacer, "recent_ms", 5_000)  # as a minute is to 1,000 producers, so are 5 s to 100
    result, _ = fleet(100, 0.05, turns=20)
    assert result.lost_share > 0.3
