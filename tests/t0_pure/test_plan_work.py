"""How much work is given out at a time, how far ahead, and how many workers it takes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs._internal.declared_option import declared
from stepfs.errors import UsageError
from stepfs_producer.run.autoscale import FEWER_AFTER_S, FEWER_EVERY_S, LOOK_EVERY_S, WorkersWanted, workers_needed
from stepfs_producer.run.options import RunOptions, TextOptions, Workers, keywords_of, parse_workers
from stepfs_producer.run.read_ahead import GROUP_RECORDS_MAX, GROUP_TOKENS_MAX, STEPS_AHEAD, Work, marks_of

STEP_TOKENS = 100_000
WORKERS = 8


def measured(*, tokens: int, seconds: float, groups: int = 30) -> Work:
    """Of records of so many tokens and seconds each."""
    work = Work()
    for _ in range(groups):
        records = work.group_records
        work.note(records, records * tokens, records * seconds, 0)
    return work


def test_groups_are_a_quarter_of_a_second_down_to_one_record() -> None:
    assert measured(tokens=700, seconds=0.001).group_records in {249, 250}
    assert measured(tokens=700, seconds=0.2).group_records == 1
    assert measured(tokens=700, seconds=9.0).group_records == 1


def test_groups_of_cheap_records_have_a_bound() -> None:
    assert measured(tokens=1, seconds=1e-9).group_records == GROUP_RECORDS_MAX
    assert measured(tokens=4096, seconds=1e-6).group_records == GROUP_TOKENS_MAX // 4096


def test_groups_grow_in_turns_and_are_small_at_once_where_records_turn_costly() -> None:
    work = Work()
    sizes = []
    for _ in range(4):
        sizes.append(work.group_records)
        work.note(sizes[-1], 700 * sizes[-1], 1e-5 * sizes[-1], 0)
    assert sizes == [1, 4, 16, 64]
    work.note(64, 1000, 60.0, 0)
    assert work.group_records == 1


def test_a_rare_costly_source_keeps_all_workers_busy() -> None:
    """5 % of the tokens at 0.2 s a record of 700 tokens, beside text at 1.5 µs a token."""
    coming = [STEP_TOKENS * STEPS_AHEAD * percent // 100 for percent in (5, 95)]
    costly, text = measured(tokens=700, seconds=0.2), measured(tokens=700, seconds=700 * 1.5e-6)
    (ahead, parallel), (of_text, beside) = marks_of(coming, [costly, text], WORKERS)
    assert parallel == WORKERS + 1
    assert ahead >= 5_000 + WORKERS * 700, "beyond the step that is planned, a record for each worker"
    assert beside <= 3
    assert coming[1] <= of_text < 2 * coming[1]


def test_a_source_alone_keeps_all_workers_busy_also_where_steps_are_small() -> None:
    text = measured(tokens=700, seconds=700 * 1.5e-6)
    ((ahead, parallel),) = marks_of([3 * 8192], [text], WORKERS)
    assert parallel == WORKERS + 1
    assert ahead > WORKERS * text.group_tokens


def test_small_blocks_do_not_let_a_cheap_source_run_far_ahead() -> None:
    work = Work()
    for _ in range(30):
        work.note(50, 2000, 1e-4, 0)
    ((ahead, _),) = marks_of([300], [work], WORKERS)
    assert work.group_records > 10_000, "a group could be as large, if a block was"
    assert WORKERS * 2000 < ahead < 5 * WORKERS * 2000


def test_before_anything_is_known_marks_follow_tokens() -> None:
    marks = marks_of([750, 250, 0], [Work(), Work(), Work()], WORKERS)
    assert [parallel for _, parallel in marks] == [7, 3, 1]
    assert [ahead >= tokens for (ahead, _), tokens in zip(marks, (750, 250, 0), strict=True)] == [True] * 3


works = st.builds(
    lambda tokens, seconds, groups: measured(tokens=tokens, seconds=seconds, groups=groups),
    st.integers(0, 5000),
    st.floats(0, 10),
    st.integers(0, 5),
)


@given(st.lists(st.tuples(st.integers(0, 1 << 22), works), min_size=1, max_size=40), st.integers(1, 64))
def test_marks_are_at_least_the_coming_steps_and_bounded_by_the_workers(sources, workers):
    coming, measures = [tokens for tokens, _ in sources], [work for _, work in sources]
    marks = marks_of(coming, measures, workers)
    assert all(ahead >= tokens for (ahead, _), tokens in zip(marks, coming, strict=True))
    assert all(1 <= parallel <= workers + 1 for _, parallel in marks)
    most = max(work.group_tokens for work in measures)
    assert sum(ahead for ahead, _ in marks) <= sum(coming) * 2 + 2 * workers * most + 2 * len(marks)
    assert sum(parallel for _, parallel in marks) <= workers + 2 * len(marks)


def test_memory_is_bounded_by_the_bytes_that_samples_have_and_not_by_their_tokens() -> None:
    work = Work()
    assert work.bytes_per_token == 8
    for _ in range(30):
        work.note(10, 1000, 0.1, 600_000)
    assert round(work.bytes_per_token) == 600


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
