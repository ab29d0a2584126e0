"""The tests that hold each promise of `fs/SEMANTICS.md`, which have to exist, and its numbers, which have to be the code's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from stepfs.cli.commands import reclaim
from stepfs.data.announced_orders import LISTED_STEPS_MAX, STREAMS_MAX
from stepfs.data.fetch import CONNECTIONS_MAX
from stepfs.data.tuning import TUNING
from stepfs.follow import polling
from stepfs.follow.follower import IDENTITY_CHECK_S
from stepfs.follow.parts import INTERVAL_S
from stepfs.follow.polling import INTERVAL_S_MAX
from stepfs.format.ids import SEGMENT_STEPS
from stepfs.lake.fleet import BEAT_S
from stepfs.lake.log.index import SEGMENT_SHARE_BYTES
from stepfs.lake.log.reader import _MISSES_PER_FLOOR_PROBE
from stepfs.mount.daemon.replacement import DRAIN_S
from stepfs.mount.launch import DEATHS, PATIENCE_S, WITHIN_S
from stepfs.mount.options import DEADLINE_S
from stepfs.view.tree import AHEAD_STEPS_MAX

ROOT = Path(__file__).parents[2]
GRACE = inspect.signature(reclaim.reclaim).parameters["grace"].default
PROSE = " ".join((ROOT / "fs/SEMANTICS.md").read_text().split())
WORDS = {2: "two", 3: "three", 5: "five", 8: "eight", 10: "ten"}
FEWEST = polling.MOUNTS_MIN
NOT = 0  # "What it is not"
LOOK_MOUNTS = 1 / polling._LOOK_S_PER_MOUNT


HELD_BY = {  # the promise: its tests, or files of them
    1: ("test_a_poller_never_sees_a_gap_or_a_step_that_is_not_whole",),
    2: (
        "test_a_steady_stream_is_seen_within_an_eighth_of_its_pace",
        "test_a_new_step_is_seen_within_the_poll_interval_by_one_who_waits",
        "test_who_asks_sees_what_is_new_half_a_second_later",
    ),
    3: (
        "test_open_files_stay_readable_and_names_never_come_back",
        "test_every_mount_of_the_group_follows_within_a_second",
        "test_a_group_that_rolls_back_shows_its_older_steps_again",
        "test_a_mistake_is_taken_back_within_grace",
        "test_a_checkpoint_after_a_roll_back_is_kept_until_the_trainer_passes_the_greater_ones",
        "test_resuming_drops_nothing_and_brings_back_what_was_dropped",
        "test_checkpoint_watch",
        "test_what_a_mount_shows_is_not_moved_by_a_counter_in_another_unit",
        "test_the_mount_with_rank_0_watches_for_all",
        "test_a_checkpoint_beyond_everything_stops_reclaim_until_it_is_corrected",
        "test_a_checkpoint_written_again_counts_again",
        "test_a_checkpoint_dropped_by_hand_comes_back_while_the_directory_holds_it",
        "test_a_lagging_node_keeps_more_for_a_while_and_drops_nothing",
        "test_steps_reclaimed_under_a_reader_of_a_quiet_lake_leave_it_within_100_s",
    ),
    4: ("test_a_listing_shows_one_moment_and_never_what_has_left_meanwhile",),
    5: ("test_tools_see_what_was_appended", "test_a_short_buffer_from_below_is_never_padded_with_zeros"),
    6: ("test_a_damaged_slice_is_eio_for_that_file_alone", "test_one_rotten_slice_in_a_joined_get_fails_alone"),
    7: (
        "test_open_files_stay_readable_and_names_never_come_back",
        "test_idle_files_are_held_before_their_objects_may_go",
    ),
    8: (
        "test_a_reader_that_waits_is_not_given_up_because_the_daemon_was_suspended",
        "test_the_store_is_away_for_a_while",
    ),
    9: ("test_numpy_memmap_is_a_shared_mapping", "test_torch_load_mmap"),
    10: (
        "test_aliases_of_steps_are_refused",
        "test_sorted_names_are_in_the_order_of_accumulation_also_of_more_than_ten_thousand",
    ),
    11: (
        "test_the_same_files_under_the_same_inodes_after_a_remount_and_on_another_node",
        "test_a_handle_outlives_the_mount_that_gave_it_and_ends_with_its_step",
    ),
    12: (
        "test_attributes_of_committed_files_are_constants_of_the_commit",
        "test_a_listing_says_of_each_entry_what_a_lookup_says",
    ),
    13: (
        "test_every_unit_is_read_by_one_data_rank_in_order_and_peers_see_the_same_inode",
        "test_ranks_of_a_world_are_hard_links",
        "test_a_world_that_does_not_fit_names_both_numbers",
    ),
    14: (
        "test_latest_follows_the_newest_step",
        "test_what_a_rank_reads_is_fetched_and_primed_by_micro_batch",
    ),
    15: ("test_what_is_not_committed_is_not_there_at_once",),
    16: (
        "test_with_wait_a_directory_beyond_the_frontier_resolves_at_once_unlisted",
        "test_a_wait_that_expires_is_enoent",
    ),
    17: (
        "test_glob_gives_equal_lists_at_once_on_two_nodes",
        "test_steps_behind_a_checkpoint_keep_their_names_so_that_a_data_set_keeps_its_length",
        "test_every_kind_of_reader_that_opened_before_the_commit_gets_the_true_bytes",
        "test_steps_beyond_the_end_of_a_sealed_lake_are_refused",
    ),
    18: (
        "test_wait_files_block_in_read_and_give_the_directorys_name",
        "test_a_wait_file_expires_like_every_wait",
        "test_nobody_waits_for_what_a_later_version_commits",
    ),
    19: (
        "test_waiting_readers_die_within_half_a_second",
        "test_waiters_queued_on_the_directorys_lock_share_the_first_ones_deadline",
    ),
    20: ("test_a_sealed_lake_ends_waits_at_once",),
    21: ("test_eight_waiting_workers_do_not_delay_a_listing_of_the_root",),
    22: (
        "test_random_order_fetches_what_is_read",
        "test_old_steps_in_random_order_cost_two_requests_each",
        "test_lookups_stats_and_listings_cost_the_store_nothing",
        "test_an_unchanged_lake_costs_one_request_per_poll_interval_at_most",
        "test_an_idle_mount_with_a_group_asks_once_a_second_and_little_else",
        "test_a_thousand_waiting_mounts_settle_and_ask_less_than_a_thousand_times_a_second",
        "test_a_store_that_throttles_is_asked_less_until_it_recovers",
    ),
    23: (
        "test_a_file_costs_three_requests_when_primed_and_its_bytes_are_fetched_once",
        "test_a_store_that_is_slow_for_each_connection_gives_what_32_connections_give",
    ),
    24: (
        "test_bad_beginnings_say_one_line_and_their_exit_code",
        "test_of_mounts_that_start_together_on_one_directory_one_lives",
    ),
    25: (
        "test_nothing_is_left",
        "test_a_busy_mount_is_left_exactly_as_it_was",
        "test_a_mount_that_is_busy_for_a_moment_is_unmounted",
        "test_a_mount_point_that_a_signal_has_left_is_closed_until_the_next_mount",
    ),
    26: (
        "test_readers_of_all_kinds_notice_nothing",
        "test_pages_that_are_cached_are_read_from_no_daemon",
        "test_a_group_that_was_retired_stays_retired",
        "test_what_was_decided_about_an_order_outlives_a_daemon_that_ends_at_once",
        "test_a_mount_shows_one_history",
        "test_a_daemon_that_follows_in_another_history_serves_what_is_cached",
        "test_what_cannot_take_over_says_why_and_the_mount_is_as_it_was",
        "test_everything_but_the_view_may_change_and_the_cache_is_kept",
        "test_where_nobody_can_follow_readers_get_errors_and_the_next_mount_heals",
        "test_contents_that_another_daemon_made_are_never_mixed_with_new_ones",
        "test_readers_of_a_killed_daemon_get_an_error_instead_of_hanging",
    ),
    27: ("test_a_hung_mount_is_left_alone_and_the_advice_frees_its_readers",),
    28: ("test_a_planted_cache_is_passed_over_for_a_fresh_one_beside_it",),
    29: ("test_a_file_of_step_numbers_and_the_end_of_it", "test_another_user_reads_and_may_not_say_what_comes_next"),
    30: ("test_a_shuffled_epoch_hits_like_a_sequential_one", "test_a_wrong_hint_costs_a_window_and_no_bytes_differ"),
    31: ("test_a_checkpoint_inside_a_shuffled_epoch_keeps_its_first_step",),
    32: (
        "test_following_gives_each_step_once_as_it_is_committed_and_ends_with_the_lake",
        "test_reclaimed_steps_are_an_error_and_never_skipped",
        "test_steps_to_come_are_waited_for_under_steps_until_the_deadline",
    ),
    33: ("test_a_damaged_slice_is_an_error_for_it_alone",),
    34: ("test_memory_is_used_again_only_when_nobody_sees_it",),
    35: (
        "test_ctrl_c_ends_a_program_that_waits",
        "test_closing_ends_who_waits_and_frees_thread_and_memory",
        "test_a_fork_in_the_middle_of_fetches_harms_neither_side",
        "test_without_pyfuse3_and_never_closed_it_reads_and_ends_with_the_interpreter",
    ),
    36: (
        "test_workers_take_turns_and_fetch_each_byte_once",
        "test_a_stage_without_encoder_fetches_none_of_its_files",
        "test_a_group_is_registered_and_keeps_what_its_reader_needs",
        "test_of_a_loader_with_a_group_its_workers_ask_nothing_for_it",
    ),
    37: (
        "test_killed_at_any_await_it_names_nothing_that_is_not_there_and_the_next_goes_on",
        "test_killed_at_random_awaits_while_the_lake_lives",
        "test_nobody_else_commits_to_a_replica",
        "test_a_replica_is_never_shortened_and_follows_no_other_history",
        "test_runs_that_read_the_replica_hold_the_lake_and_its_producers",
        "test_it_is_the_same_lake_and_says_of_whom",
    ),
    38: (
        "test_absent_and_damaged_objects_alone_come_from_the_lake",
        "test_a_late_answer_costs_two_seconds_once_and_its_bytes_go_nowhere",
        "test_where_the_lake_does_not_answer_a_resting_place_is_asked_again",
        "test_a_block_that_nobody_opened_waits_for_its_copy",
        "test_rests_grow_and_end_with_the_first_answer",
    ),
    39: ("test_every_byte_is_read_and_every_check_holds", "test_what_a_trainer_saved_is_loaded"),
    40: (
        "test_who_lacks_what_writers_need_writes_nothing_and_reads_on",
        "test_a_check_calls_nothing_damaged_that_a_later_version_wrote_and_repairs_nothing",
    ),
    41: (
        "test_a_fleet_is_upgraded_and_goes_back_under_a_trainer",
        "test_the_three_lines_upgrade_a_mount_under_a_dataloader",
        "test_a_producer_that_runs_stops_where_writers_need_what_it_lacks",
    ),
    42: (
        "test_values_of_another_version_take_the_default",
        "test_what_cannot_take_over_says_why_and_the_mount_is_as_it_was",
    ),
    43: ("test_the_digest_of_a_plan_is_the_same_for_ever", "test_what_changed_is_said_in_lines"),
    44: ("test_nothing_public_changes_without_a_line_in_the_changelog",),
    NOT: (
        "test_every_change_is_refused_and_special_facts_are_not_there",
        "test_content_is_fixed_when_a_file_is_opened_and_never_cached_by_the_kernel",
    ),
}


def test_every_promise_has_tests_of_which_a_push_runs_some():
    written, at_night = set(), set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        written |= {path.stem} | set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
        all_at_night = re.search(r"^pytestmark = .*nightly", text, re.MULTILINE)
        marked = "" if all_at_night else r"@pytest\.mark\.nightly.*\n(?:[@ )].*\n)*"
        at_night |= set(re.findall(rf"^{marked}(?:async )?def (test_\w+)", text, re.MULTILINE))
    named = {test for tests in HELD_BY.values() for test in tests}
    assert named <= written, sorted(named - written)
    promises = re.findall(r"^(\d+)\. ", (ROOT / "fs/SEMANTICS.md").read_text(), re.MULTILINE)
    assert [int(number) for number in promises] == [number for number in HELD_BY if number != NOT]
    assert [number for number, tests in HELD_BY.items() if not {*tests} - at_night] == []


@pytest.mark.parametrize(
    "sentence",
    [
        f"an eighth of the time between steps, at most {INTERVAL_S_MAX:g} s",
        f"longer in a run of {FEWEST} or more mounts (rule 22)",
        f"or {WORDS[INTERVAL_S_MAX]} while nothing is read and no step comes (longer with more than {LOOK_MOUNTS:g} mounts",
        f"`--grace` ({'an hour' if GRACE == '1h' else GRACE}, by the store's clock)",
        f"or within {_MISSES_PER_FLOOR_PROBE * INTERVAL_S_MAX:g} s.",
        f"after {DEADLINE_S:g} s they fail with `ETIMEDOUT`",
        f"gives up after {WORDS[DEATHS]} deaths within a minute, or {PATIENCE_S:g} s in which none came to serve, with pauses"
        f" between the attempts; while the store does not answer, after {DEADLINE_S:g} s"[
            : None if WITHIN_S == 60 else 0
        ],
        f"begin anew, and reads that take longer than {DRAIN_S:g} s",
        f"names of the next {AHEAD_STEPS_MAX} steps",
        f"and one every {IDENTITY_CHECK_S:g} s, which checks",
        f"one per poll interval, at most one per {'second' if INTERVAL_S == 1.0 else INTERVAL_S}",
        f"one PUT every {BEAT_S:g} s for the fleet view",
        f"a run of N ≥ {FEWEST} mounts (all ranks ÷ those of `--ranks`; fewer change nothing) none polls more often than every N ms",
        f"more often than every max({INTERVAL_S:g} s, N/{LOOK_MOUNTS:g} s)",
        f"up to {WORDS[int(polling.SLOWER_MAX)]} times less often",
        f"one per {SEGMENT_STEPS} steps for their index",
        f"at most {SEGMENT_SHARE_BYTES >> 10} KiB for each",
        f"from {TUNING.connections_min} to {CONNECTIONS_MAX}.",
        f"more than {LISTED_STEPS_MAX:,} steps",
        f"At most {STREAMS_MAX} orders",
    ],
)
def test_the_numbers_of_the_promises_are_those_of_the_code(sentence):
    assert sentence in PROSE
