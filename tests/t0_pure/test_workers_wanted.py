"""Options of a run, and `--workers MIN:MAX`: more at once, fewer by one per ten seconds after a minute, never beyond
the bounds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.declared_option import declared
from stepfs.errors import UsageError
from stepfs_producer.run.measured import FEWER_AFTER_S, FEWER_EVERY_S, LOOK_EVERY_S, WorkersWanted, workers_needed
from stepfs_producer.run.options import RunOptions, TextOptions, Workers, keywords_of, parse_workers


def followed(wanted: WorkersWanted, needs: list[float]) -> list[int]:
    """The number of workers after each look."""
    return [wanted.next(number * LOOK_EVERY_S, need) for number, need in enumerate(needs)]


def test_the_need_is_work_per_step_times_the_rate_that_is_taken() -> None:
    assert workers_needed(work_s=8, steps=4, seconds=5, steps_per_second=None) == pytest.approx(2 * 0.8 / 0.8)
    assert workers_needed(work_s=8, steps=4, seconds=5, steps_per_second=2) == pytest.approx(2 * 2 / 0.8)
    assert workers_needed(work_s=10, steps=0, seconds=5, steps_per_second=9) == pytest.approx(2 / 0.8)
    assert workers_needed(work_s=0, steps=0, seconds=5, steps_per_second=None) == 0


def test_more_come_at_once() -> None:
    assert followed(WorkersWanted(2, 16), [1.5, 9.2, 40]) == [2, 10, 16]


def test_workers_that_never_pause_become_as_many_as_may_be() -> None:
    wanted, workers = WorkersWanted(2, 16), 2
    for number in range(8):
        workers = wanted.next(number * LOOK_EVERY_S, workers_needed(workers * LOOK_EVERY_S, 1, LOOK_EVERY_S, None))
    assert workers == 16


def test_fewer_come_one_by_one_after_a_minute() -> None:
    looks = int(FEWER_AFTER_S / LOOK_EVERY_S)
    after = followed(WorkersWanted(1, 8), [5.0] + [0.5] * (3 * looks))
    assert after[: looks + 1] == [5] * (looks + 1)
    steps = int(FEWER_EVERY_S / LOOK_EVERY_S)
    assert after[looks + 1 :: steps][:5] == [4, 3, 2, 1, 1]
    assert all(before - now in {0, 1} for before, now in pairwise(after))


def test_a_need_within_the_last_minute_keeps_them() -> None:
    looks = int(FEWER_AFTER_S / LOOK_EVERY_S)
    assert set(followed(WorkersWanted(1, 8), ([5.0] + [0.0] * (looks - 1)) * 4)) == {5}


@given(st.integers(1, 9), st.integers(0, 9), st.lists(st.floats(0, 1e9), max_size=60))
def test_the_bounds_hold(least: int, more: int, needs: list[float]) -> None:
    assert all(least <= workers <= least + more for workers in followed(WorkersWanted(least, least + more), needs))


@pytest.mark.parametrize(("text", "workers"), [("4", Workers(4, 4)), ("2:8", Workers(2, 8)), ("3:3", Workers(3, 3))])
def test_workers_are_a_number_or_a_range(text: str, workers: Workers) -> None:
    assert parse_workers(text) == workers
    assert parse_workers(str(workers)) == workers


@pytest.mark.parametrize("text", ["4:2", "0", "0:3", "-1", "", ":", "2:", ":4", "1:2:3", "x", "1.5"])
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--workers .*: use N or MIN:MAX") as caught:
        parse_workers(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan])
def test_a_rate_that_is_not_above_zero_is_refused_by_its_name(rate):
    with pytest.raises(UsageError, match=r"^steps_per_second=.*: use a number above 0$"):
        RunOptions("file:///lake", steps_per_second=rate)


def test_an_option_of_both_commands_is_one_declaration():
    of_run, of_text = declared(RunOptions), declared(TextOptions)
    assert of_run["limit_steps"] == of_text["limit_steps"]


def test_python_takes_the_same_options_as_values_or_as_texts():
    given = {"workers": 4, "memory": "1G", "max_live_bytes": 7, "max_lead": None, "engine": "local"}
    wanted = {"workers": Workers(4, 4), "memory": 1 << 30, "max_live_bytes": 7, "max_lead": None, "engine": "local"}
    assert keywords_of(RunOptions, given) == wanted
    assert keywords_of(RunOptions, {"workers": "2:8"}) == {"workers": Workers(2, 8)}
    with pytest.raises(TypeError, match="no option 'worker'; known: producer_id, "):
        keywords_of(RunOptions, {"worker": 4})
    with pytest.raises(UsageError, match="--engine other: use local or ray"):
        RunOptions("file:///lake", engine="other")
