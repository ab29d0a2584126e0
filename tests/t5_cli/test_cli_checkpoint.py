"""`stepfs checkpoint`: what is kept after a save, a resume and a drop, and what the command refuses."""

from __future__ import annotations

import pytest
from lakes import SLICES, commit, stepfs


@pytest.fixture
def lake(file_url: str) -> str:
    assert stepfs("init", file_url, "--slices", SLICES).code == 0
    commit(file_url, range(12))
    return file_url


def checkpoint(lake: str, *arguments: object) -> list[int]:
    new = [] if "--drop" in arguments else ["--new-group"]
    ended = stepfs("checkpoint", lake, "--group", "run", "--json", *new, *arguments)
    assert ended.code == 0, ended.err
    return ended.document["kept"]


def test_a_roll_back_loses_neither_what_training_resumed_from_nor_what_it_saves_next(lake):
    checkpoint(lake, 9)
    assert checkpoint(lake, 10, "--keep", 2) == [9, 10]
    assert checkpoint(lake, 4, "--resumed") == [4, 9, 10]
    assert checkpoint(lake, 5, "--keep", 2) == [4, 5, 9, 10]
    assert stepfs("reclaim", lake, "--json").document["first_live_step"] == 4
    assert checkpoint(lake, 11, "--keep", 2) == [5, 11]


def test_what_training_resumed_from_counts_as_newer_than_what_it_left(lake):
    for step in (8, 9, 10):
        checkpoint(lake, step)
    checkpoint(lake, 8, "--resumed")
    assert checkpoint(lake, 11, "--keep", 2) == [8, 11]


def test_a_drop_is_of_that_checkpoint_alone(lake):
    checkpoint(lake, 4)
    checkpoint(lake, 9)
    assert checkpoint(lake, 4, "--drop") == [9]
    again = stepfs("checkpoint", lake, "--group", "run", 4, "--drop")
    assert (again.code, "keeps no checkpoint" in again.err) == (3, True)


@pytest.mark.parametrize(
    "arguments", [
        ["4", "--resumed", "--drop"], ["4", "--resumed", "--keep", "2"], ["4", "--drop", "--keep", "2"],
        ["4", "--pace", "--drop"],
    ],
)  # fmt: skip
def test_one_thing_is_said_at_a_time(lake, arguments):
    ended = stepfs("checkpoint", lake, "--group", "run", *arguments)
    assert (ended.code, "give one of --keep K" in ended.err) == (2, True)


def test_resuming_where_steps_are_reclaimed_is_refused_and_changes_nothing(lake):
    checkpoint(lake, 9)
    stepfs("reclaim", lake)
    ended = stepfs("checkpoint", lake, "--group", "run", "--new-group", 4, "--resumed")
    assert (ended.code, "are reclaimed; nothing was recorded" in ended.err) == (4, True)
    assert checkpoint(lake, 9) == [9]


@pytest.mark.parametrize("how", [["11"], ["11", "--keep", "1"], ["11", "--resumed"], ["9", "--drop"]])
def test_a_mistyped_group_is_absent_and_pins_nothing(lake, how):
    checkpoint(lake, 9)
    ended = stepfs("checkpoint", lake, "--group", "rnu", *how)
    assert ended.code == 3
    assert "do you mean 'run'?" in ended.err
    assert ("--new-group" in ended.err) == ("--drop" not in how)
    retired = stepfs("retire-group", lake, "rnu")
    assert (retired.code, "do you mean 'run'?" in retired.err, "--new-group" in retired.err) == (3, True, False)
    assert list(stepfs("status", lake, "--json").document["groups"]) == ["run"]


def test_a_new_group_is_made_when_it_is_asked_for(lake):
    assert checkpoint(lake, 9) == [9]
    assert stepfs("checkpoint", lake, "--group", "run", "10").code == 0
    assert stepfs("retire-group", lake, "run").code == 0
    assert stepfs("checkpoint", lake, "--group", "run", "11").code == 3, "it is over"
    assert checkpoint(lake, 11) == [11]


def test_a_pace_holds_nothing_and_is_of_a_run_that_there_is(lake):
    for name in ("rnu", "x" * 251):
        assert stepfs("checkpoint", lake, "--group", name, "3", "--pace").code in (2, 3)
    checkpoint(lake, 9)
    said = stepfs("checkpoint", lake, "--group", "run", "5", "--pace")
    assert (said.code, said.out) == (0, "run run is at step 5; producers with a bounded lead keep near it\n")
    shown = stepfs("status", lake, "--json").document
    assert (shown["paces"], list(shown["groups"])) == ({"run": 5}, ["run"])
    assert "pace      run run is at step 5, " in stepfs("status", lake).out
    assert stepfs("reclaim", lake, "--json").document["first_live_step"] == 9, "below the pace, too"
    assert stepfs("checkpoint", lake, "--group", "run", "4", "--pace", "--json").document["need"] == 4
    assert stepfs("checkpoint", lake, "--group", "run", "99", "--pace").code == 2
    assert stepfs("checkpoint", lake, "--group", "eval", "2", "--pace", "--new-group").code == 0
    assert stepfs("retire-group", lake, "eval").code == 0
    assert stepfs("retire-group", lake, "run").code == 0
    assert stepfs("status", lake, "--json").document["paces"] == {}


def test_new_group_belongs_to_what_adds(lake):
    assert stepfs("checkpoint", lake, "--group", "run", "--new-group", "4", "--drop").code == 2
