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
    Contents,
    Report,
    Run,
    Shares,
    SourceFigures,
    StepLook,
    between,
    forecast_of,
    joined,
    spread,
    wanted_shares,
    without_secrets,
)
from stepfs_producer.report.page import page_of
from stepfs_producer.run.view import Document, Part, Row

DAY = 86_400.0


def commits(*places: tuple[float, int, int]) -> list[CommitPoint]:
    return [CommitPoint(day * DAY, "plan", steps, steps, size) for day, steps, size in places]


def test_a_forecast_goes_on_as_the_last_fifth_did():
    slow = [(day / 10, day, day * 10) for day in range(8)]
    points = commits(*slow, (1.0, 100, 1000), (2.0, 200, 3000))
    found = forecast_of(points, 2 * DAY, 300, 500, 20_000)
    assert (found.steps_per_day, found.bytes_per_day) == (100, 2000)
    assert (found.ends, found.bytes_at_end) == (5 * DAY, 500 + 300 * 20)
    assert found.full is None, "the plan ends before"
    assert forecast_of(points, 2 * DAY, 300, 500, 4000).full == 4 * DAY
    assert forecast_of(points, 2 * DAY, None, 500, 20_000).full == 12 * DAY
    rests = forecast_of(points, 3 * DAY, None, 500, 20_000)  # nothing came for a day
    assert (rests.bytes_per_day, rests.full) == (1000, 23 * DAY)
    endless = forecast_of(points, 2 * DAY, None, 500, None)
    assert (endless.ends, endless.bytes_at_end, endless.full) == (None, None, None)


@pytest.mark.parametrize(
    "points", [[], [(1.0, 1, 1)], [(1.0, 1, 1), (1.0, 2, 2)], [(2.0, 1, 1), (1.0, 2, 2)], [(0.0, 1, 1), (1e-4, 2, 2)]]
)
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


def test_a_page_of_the_most_that_there_may_be_has_less_than_two_mebibytes():
    name = "語" * 190
    producers = [Contents(f"{number}{name}", "0" * 32, 5, 9, 5) for number in range(4)]
    for contents in producers:
        contents.sources = {f"{n}{name}": SourceFigures(tokens=n, lengths=[1] * 30) for n in range(3000)}
        names = dict.fromkeys(contents.sources, 1)
        contents.shares = [Shares(n, n + 1, names, names) for n in range(64)]
        contents.looked = [StepLook(n, n / 256, {"cost": 1.5, "tokens": 1.0}) for n in range(256)]
    group = {"need": 3, "kept": list(range(4000)), "held_bytes": 1, "held_for": None}
    node = {
        "host": name,
        "directory": "/run",
        "group": "g",
        "frontier": 3,
        "last_step": 2,
        "waited_ratio": 0.5,
        "time": 1.0,
    }
    status = {
        "next_step": 9, "first_step": 0, "frontier": 8, "sealed": False, "live_bytes": 5, "total_bytes": 9, "time": 5.0,
        "groups": {f"{n}{name}": group for n in range(300)}, "nodes": [{**node, "stale": True}] * 3000,
        "producers": {f"{n}{name}": {"retired": False, "next_seq": 1, "epoch": 1, "time": 5.0} for n in range(3000)},
    }  # fmt: skip
    points = [CommitPoint(float(n), f"{n % 9}{name}", n, n + 1, 1 << n) for n in range(256)]
    forecast = forecast_of(points, 300.0, 7, 9, 1 << 300)
    parts = [Part("text", '"' * 5000, [1] * 5000, learned=True)] * 100
    document = Document(0, 9, name, 0, name, 1, 0, None, (), parts, 3)
    rows = [("step 1", Row(0, 0, 0, 9, 3, [document] * 100))] * 20
    report = Report("s3://a:b@c/d", 1e9, producers, Run(status, points, forecast), "A sample.", ["a"] * 20, rows, "why")
    page = page_of(report, {"size": str, "when": str}, text=True)
    assert 1 << 19 < len(page.encode()) < 2 << 20
    assert "s3://c/d" in page
    assert "more rows were left out" in page
    assert page.count("2900 more are not shown") == 6
