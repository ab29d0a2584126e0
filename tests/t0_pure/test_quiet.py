"""Quiet times as a function of what a writer has seen: when it is silent, and what no clock can do."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfs.lake.log.quiet import EVERY_S, QUIET_S, RESTED_S, SAY_AFTER_S, QuietTimes, Waiting

BUSY_S = 0.03  # between two looks of a stream without gaps


def busy(until_s: float, *, ahead_s: float = 0.0) -> QuietTimes:
    """A writer that has looked all the time since 0, and a log whose time is so far ahead of its clock."""
    quiet = QuietTimes()
    for look in range(int(until_s / BUSY_S) + 1):
        quiet.note(look * BUSY_S, look, int((look * BUSY_S + ahead_s) * 1000))
    return quiet


def test_a_busy_writer_is_silent_in_the_first_seconds_of_each_turn() -> None:
    quiet = busy(29.9)
    assert quiet.kept_s(29.95) == 29.95
    assert quiet.kept_s(30.0) == pytest.approx(EVERY_S + QUIET_S)
    assert quiet.kept_s(32.9) == pytest.approx(EVERY_S + QUIET_S)
    assert quiet.kept_s(33.0) == 33.0


def test_the_log_s_time_counts_and_not_the_own_clock() -> None:
    assert busy(19.9, ahead_s=10.0).kept_s(20.0) == pytest.approx(20.0 + QUIET_S, abs=0.002)


def test_a_newcomer_and_a_stream_with_gaps_are_not_silent() -> None:
    assert QuietTimes().kept_s(1.0) == 1.0
    assert busy(RESTED_S / 2, ahead_s=EVERY_S - RESTED_S / 2).kept_s(RESTED_S / 2 + 1) == RESTED_S / 2 + 1
    quiet = busy(25.0)
    quiet.note(25.0 + QUIET_S, round(25.0 / BUSY_S) + 1, 28_000)
    assert quiet.kept_s(30.0) == 30.0


def test_a_pause_does_not_count_quiet_times() -> None:
    quiet = busy(29.0)
    assert quiet.after_s(29.0, 0.5) == pytest.approx(29.5)
    assert quiet.after_s(29.0, 2.0) == pytest.approx(31.0 + QUIET_S)
    assert quiet.after_s(29.0, 2.0 + 5 * (EVERY_S - QUIET_S)) == pytest.approx(31.0 + QUIET_S + 5 * EVERY_S)
    assert quiet.after_s(31.0, 2.0) == pytest.approx(EVERY_S + QUIET_S + 2.0)
    assert quiet.after_s(float("-inf"), 2.0) == float("-inf")


def test_who_is_locked_out_tries_at_the_next_beginning_or_at_once() -> None:
    quiet = busy(29.0)
    assert quiet.open_s(29.0) == pytest.approx(30.0)
    assert quiet.open_s(31.0) == 31.0
    assert QuietTimes().open_s(31.0) == float("inf")


def test_a_log_whose_time_stands_still_has_quiet_times_nevertheless() -> None:
    """As with a clock a day ahead that has left: each commit's time is the previous one's and a millisecond."""
    quiet = QuietTimes()
    for look in range(int(59.0 / BUSY_S)):
        quiet.note(look * BUSY_S, look, 86_400_000 + look)
    assert quiet.kept_s(60.0) == pytest.approx(63.0)
    assert quiet.kept_s(63.0) == 63.0


@settings(max_examples=20)
@given(st.integers(-(2**62), 2**62), st.lists(st.integers(-(10**5), 10**5), min_size=300, max_size=300))
def test_whatever_the_commits_times_a_silence_is_short_and_the_next_is_far(first_ms, steps_ms):
    quiet, now_s, silences = QuietTimes(), 0.0, []
    for version, time_ms in enumerate(itertools.accumulate(steps_ms, initial=first_ms)):
        quiet.note(now_s, version, time_ms)
        due_s = now_s + 0.2
        now_s = quiet.kept_s(due_s)
        if now_s > due_s:
            silences.append((due_s, now_s))
            assert now_s - due_s <= QUIET_S
            assert quiet.kept_s(now_s) <= now_s + 0.002, "it is over when it said"
    for (_, ended_s), (began_s, _) in itertools.pairwise(silences):
        assert began_s - ended_s >= RESTED_S - 0.01


@pytest.mark.logs("the seal has waited 10 s")
def test_who_waits_says_so_once_and_not_before_it_has_lasted(caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting("the seal")
    assert waiting.note_lost(100.0) == 0.0
    assert waiting.note_lost(99.9 + SAY_AFTER_S) == pytest.approx(SAY_AFTER_S - 0.1)
    assert not caplog.records
    for later_s in (0.0, 1.0, 100.0):
        waiting.note_lost(100.0 + SAY_AFTER_S + later_s)
    assert [record.args[:2] for record in caplog.records] == [("the seal", SAY_AFTER_S)]  # type: ignore[index]
