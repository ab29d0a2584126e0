"""Figures and drawings of a report, from numbers alone."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import numpy as np
import pytest

from stepfs_producer.plan.mix import ONE, MixEntry, MixSchedule
from stepfs_producer.report.charts import Axis, Line, drawn
from stepfs_producer.report.figures import (
    CommitPoint,
    Shares,
    SourceFigures,
    between,
    forecast_of,
    joined,
    spread,
    wanted_shares,
    without_secrets,
)

DAY = 86_400.0


def commits(*places: tuple[float, int, int]) -> list[CommitPoint]:
    return [CommitPoint(day * DAY, "plan", steps, steps, size) for day, steps, size in places]


def test_a_forecast_goes_on_as_the_last_fifth_did():
    slow = [(day / 10, day, day * 10) for day in range(8)]
    points = commits(*slow, (1.0, 100, 1000), (2.0, 200, 3000))
    found = forecast_of(points, 3 * DAY, 300, 500, 20_000)
    assert (found.steps_per_day, found.bytes_per_day) == (100, 2000)
    assert (found.ends, found.bytes_at_end) == (6 * DAY, 500 + 300 * 20)
    assert found.full is None, "the plan ends before"
    assert forecast_of(points, 3 * DAY, 300, 500, 4000).full == 5 * DAY
    assert forecast_of(points, 3 * DAY, None, 500, 20_000).full == 13 * DAY
    endless = forecast_of(points, 3 * DAY, None, 500, None)
    assert (endless.ends, endless.bytes_at_end, endless.full) == (None, None, None)


@pytest.mark.parametrize("points", [[], [(1.0, 1, 1)], [(1.0, 1, 1), (1.0, 2, 2)], [(2.0, 1, 1), (1.0, 2, 2)]])
def test_commits_without_a_pace_give_none(points):
    assert forecast_of(commits(*points), 0.0, 5, 0, 5) is None


def test_counts_until_a_step_become_those_of_the_steps_between():
    points = [(10, {"a": 5}), (10, {"a": 5}), (30, {"a": 9, "b": 6})]
    assert between(points) == [(range(10), {"a": 5}), (range(10, 30), {"a": 4, "b": 6})]


def test_neighbours_join_by_their_steps_and_no_token_is_lost():
    shares = [Shares(n, n + 1, {"a": n, "b": 1}, {"a": 0.5}) for n in range(9)] + [Shares(9, 19, {"a": 9}, {"a": 1.0})]
    found = joined(shares, 5)
    assert [(one.first, one.next) for one in found] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 19)]
    assert sum(one.tokens["a"] for one in found) == sum(range(10))
    assert found[-1].wanted["a"] == pytest.approx((0.5 + 10) / 11)
    assert joined([], 5) == []


@pytest.mark.parametrize(("length", "most"), [(0, 4), (1, 1), (3, 4), (9, 1), (9, 2), (100_000, 256)])
def test_a_sample_has_both_ends_and_no_more_than_asked(length, most):
    found = spread(range(7, 7 + length), most)
    assert len(found) == min(length, most)
    assert found == sorted(set(found))
    assert not found or found[-1] == 6 + length
    assert most == 1 or not found or found[0] == 7


def test_a_mix_is_that_of_the_steps():
    mix = MixSchedule([MixEntry(0, (ONE, 0)), MixEntry(10, (0, ONE), ramp=True)])
    assert wanted_shares(mix, ["a", "b"], range(11)) == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}
    assert wanted_shares(mix, ["a", "b"], range(10, 99)) == {"a": 0, "b": 1}


def test_lengths_count_by_powers_of_two():
    source = SourceFigures()
    for lengths in ([1, 2, 3], [], [4, 7, 8, 1 << 20]):
        source.note_lengths(np.array(lengths, np.int64))
    assert {at: count for at, count in enumerate(source.lengths) if count} == {0: 1, 1: 2, 2: 2, 3: 1, 20: 1}


def test_urls_keep_no_secret():
    assert without_secrets("s3://key:secret@bucket/run?X-Amz-Signature=5") == "s3://bucket/run"
    assert without_secrets("file:///a@b/c?d") == "file:///a@b/c?d"
    assert without_secrets("plan@2.yaml") == "plan@2.yaml"


@pytest.mark.parametrize("days", [0, 0.001, 0.4, 5, 700])
def test_a_drawing_has_its_texts_and_the_colours_of_the_page(days):
    begin = datetime(2026, 11, 28, 15, 0, tzinfo=UTC).timestamp()
    x = [begin + days * DAY * at / 40 for at in range(40)] + [1e17]  # a clock was wrong
    svg = drawn([Line(x, range(41)), Line(x[:2], [3, 4], 9, dashed=True)], Axis("time, UTC", "time"), Axis("steps"))
    assert svg.startswith("<svg viewBox=")
    assert "time, UTC" in svg
    assert ("2026" in svg) == (days > 0)
    assert not re.findall(r"#[0-9a-f]{6}|http(?!://www\.w3\.org/1999/xlink)", svg)
    assert "var(--c2)" in svg, "the tenth line has the third colour"
    assert drawn([], Axis("x"), Axis("y", "percent")).count("<text") >= 2
