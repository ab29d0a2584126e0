"""The tests that hold each section of COMMIT.md, which have to exist, and its numbers, which have to be those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepfs.format.commit import COMMIT_ID_BYTES, COMMIT_TGBS_MAX
from stepfs.format.ids import PRODUCERS_MAX, SEGMENT_STEPS
from stepfs.lake.control import _LIST_AFTER_S
from stepfs.lake.log.append import _GIVE_UP_S, _GIVES_WAY_EVERY_S, ASKS_AFTER_S, ASKS_EVERY_S, PAUSE_S, SAY_AFTER_S
from stepfs.lake.log.snapshots import _VERSIONS_MAX
from stepfs_producer.commit import pace
from stepfs_producer.commit.backpressure import LOOK_JITTER, LOOK_S_MAX, LOOK_S_MIN
from stepfs_producer.commit.loop import IDENTITY_CHECK_S, LOSSES_WORTH_SAYING, SETTLE_S_MAX
from stepfs_producer.commit.rebase import COMMIT_DESCRIPTOR_BYTES_MAX, POSITIONS_BYTES_MAX
from stepfs_producer.commit.uploads import UNCOMMITTED_FACTOR, UNCOMMITTED_TGBS_MAX

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "producer/COMMIT.md").read_text()
PROSE = " ".join(TEXT.split())
WORDS = ["no", "one", "two", "three", "four", "five"]
MINUTE_S = 60


HELD_BY = {  # the section: its tests, or files of them
    "Promises": (
        "test_producer_restart",
        "test_a_zombie_frozen_at_any_await_publishes_nothing_after_its_successor",
        "test_commit_counts",
        "test_growth",
        "test_an_outage_is_borne_and_a_longer_one_ends_the_producer",
    ),
    "Assumptions about the store": (
        "test_commit_hazards",
        "test_cloud_answers",
        "test_s3_credentials",
    ),
    "Objects a producer touches": ("test_a_producer_overwrites_nothing_and_deletes_only_its_probes",),
    "Names": ("test_concurrent_appends_get_dense_seqs",),
    "The loop": (
        "test_rebase",
        "test_a_writer_that_is_wrong_writes_nothing",
        "test_no_producer_is_refused_by_a_slot_that_is_taken_again",
        "test_ambiguous_commits",
        "test_an_ambiguous_create_is_unknown_and_happened",
    ),
    "Invariants between two awaits": (
        "test_reader_hazards",
        "test_rebase",
        "test_a_cancelled_append_never_happened",
        "test_payloads_reused_by_the_caller_do_not_reach_the_log",
        "test_killed_at_any_await_and_restarted",
        "test_the_first_failure_is_kept_and_ends_all_other_work",
    ),
    "Tickets": ("test_tickets",),
    "Starting, fencing, retiring": (
        "test_of_racing_starts_exactly_one_lives",
        "test_hostile_bytes",
        "test_damaged_snapshots",
        "test_retiring_flushes_fences_and_can_be_undone_by_a_restart",
        "test_one_reclaim_leaves_exactly_what_is_needed",
    ),
    "Pacing": (
        "test_pace",
        "test_commit_hazards",
        "test_pace_simulation",
        "test_far_producers",
        "test_a_lone_producer_waits_for_nobody",
        "test_mutant_nobody_gives_way",
        "test_an_operator_who_never_wins_says_so_and_gives_up",
    ),
    "Back-pressure": (
        "test_append_waits_for_nothing_but_the_budget",
        "test_lead",
        "test_several_producers_exceed_the_bound_by_what_each_appends_between_its_looks",
        "test_a_held_producer_looks_ever_more_rarely",
        "test_a_hold_names_group_and_checkpoint_and_what_to_type",
    ),
    "Groups and the floor: one sequence": (
        "test_decisions",
        "test_groups_and_reclaim",
        "test_a_refusal_writes_nothing",
        "test_control_limits",
        "test_a_reclaimer_that_sleeps_for_a_day_at_any_await",
        "test_late_changes",
        "test_an_unanswered_request_and_the_same_again_are_one_record",
        "test_a_new_process_fences_a_request_of_the_one_before",
        "test_a_retired_group_that_a_late_request_brings_back_keeps_what_it_says",
        "test_second_chance",
        "test_fork_kills",
        "test_control_damage",
        "test_control_sequence",
    ),
    "Snapshots": ("test_damaged_snapshots",),
    "Hazards": (
        "test_commit_hazards",
        "test_another_history",
        "test_reader_hazards",
        "test_a_lake_is_never_created_and_a_lying_store_never_trusted",
        "test_groups_and_reclaim",
        "test_run_hazards",
        "test_tickets",
        "test_producer_restart",
        "test_simulator",
        "test_model",
    ),
    "To prove again after a change": ("test_commit_counts",),
}


def written() -> set[str]:
    """The names of all tests, and of their files."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    return tests


def test_every_section_has_tests_and_they_exist() -> None:
    """But for the one that promises nothing."""
    titles = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert titles == [*HELD_BY, "Rejected"]
    assert all(HELD_BY.values())
    named = {test for tests in HELD_BY.values() for test in tests} | set(re.findall(r"`(test_\w+)\.py`", TEXT))
    assert named <= written(), sorted(named - written())


def test_every_hazard_has_a_scenario_of_its_number() -> None:
    section = TEXT.partition("## Hazards\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    assert numbers == list(range(1, 14))
    of_plans = {12: "p4"}
    for number in numbers:
        prefix = f"test_hazard_{of_plans.get(number, f'{number:02d}')}_"
        assert any(name.startswith(prefix) for name in written()), prefix


@pytest.mark.parametrize(
    "sentence", [
        f"again every {IDENTITY_CHECK_S:g} s while committing", f"and {COMMIT_ID_BYTES} random bytes",
        f"({COMMIT_TGBS_MAX} batches, {COMMIT_DESCRIPTOR_BYTES_MAX >> 20} MiB of descriptors)",
        f"while all positions together exceed {POSITIONS_BYTES_MAX >> 20} MiB",
        f"a lake takes {PRODUCERS_MAX:,} producer ids",
        f"T = max({1000 * pace.INTERVAL_S_MIN:g} ms, (N̂ − 1) · v̂ / {pace.LOAD:g})",
        f"within {1 + pace.JITTER:g} T",
        f"T is at most {WORDS[int(pace.TURNS_MAX)]} *turns*",
        f"capped at {1 / pace.INTERVAL_S_MIN:g} commits/s",
        f"After {LOSSES_WORTH_SAYING} losses in a row",
        f"is silent for {PAUSE_S:g} s, and then not again for {_GIVES_WAY_EVERY_S - PAUSE_S:g} s",
        f"asks again after {ASKS_EVERY_S:g} s",
        f"when {WORDS[int(pace.TURNS_MAX)]} turns have passed",
        f"loses for {'a second' if ASKS_AFTER_S == 1 else ASKS_AFTER_S} when",
        f"After {SAY_AFTER_S:g} s a start and an operator's commit log once",
        f"gives up after {_GIVE_UP_S:g} s",
        f"reach {UNCOMMITTED_FACTOR} × that, or {UNCOMMITTED_TGBS_MAX} batches",
        f"after {LOOK_S_MIN:g} s, then after pauses that double up to {LOOK_S_MAX:g} s (± {100 * LOOK_JITTER:g} %)",
        f"not looked for {'a minute' if _LIST_AFTER_S == MINUTE_S else _LIST_AFTER_S}",
        f"({SEGMENT_STEPS} steps), or crosses a multiple of {_VERSIONS_MAX} versions",
        f"waits up to {SETTLE_S_MAX:g} s for a snapshot",
    ],
)  # fmt: skip
def test_the_numbers_of_the_prose_are_those_of_the_code(sentence: str) -> None:
    assert sentence in PROSE
