"""Features on both axes: each pair names the test that crosses the two, or says why they cannot meet.

Nearly all defects that were found late lay between two features, each of which had its tests. So a new option belongs
to a feature below, and a new feature has a cell with each of the others, before it is done.
"""

from __future__ import annotations

import ast
import functools
from itertools import combinations
from pathlib import Path

import pytest
from programs import commands_of

from stepfs.cli.app import app
from stepfs_producer.cli.app import app as producing

TESTS = Path(__file__).parents[1]

# feature → the options that choose it, of one command or of all that have them
FEATURES = {
    "fork": "fork:--skip fork:--until fork:--rewind fork:--until-damage",
    "steps": "mount:--steps mount:--wait",
    "show_last": "mount:--show-last mount:--list-latest",
    "order": "",  # `ShuffledSteps`, `.stepfs/order`
    "mesh": "mount:--ranks mount:--world mount:--mesh --slices init:--ranks --micro-batches --cp --rank --micro --beside",
    "groups": "--group --checkpoint-dir --next-step --checkpoint --keep --resumed --drop --new-group --retire",
    "reclaim": "--dry-run --every --max-percent --grace --orphans",
    "seal": "--seal",
    "holdout": "--holdout",
    "producers": "--producer-id --shard",
    "lead": "--max-lead --max-live-bytes",
    "rollback": "verify:--repair",  # of the store, to a copy
    "kill": "--cache-dir --cache-size --foreground --replace --recover",  # kill -9, restarts, unmounting, other daemons
    "replaced": "",  # another lake under the URL, of a lake or of a fork's parent
    "namespaces": "--allow-other",  # bind mounts, pods, other users
    "replica": "--from --keep-all --check",
}

# why an option is of no feature → the options
APART = {
    "it says the same in another form": "--json --watch --bundle --schema --keys --metrics-port --metrics-address --text "
    "--log-format --man",
    "it says how a store or a machine is reached": "--endpoint-url --near --engine --ray-address --workers --wait-for-lake",
    "it bounds resources, and changes no byte": "--memory-size --memory --prefetch --prime --poll --steps-per-second",
    "it chooses what one command looks at": "--step --source --file --record --plan-dir --content --compare --to "
    "--no-sources --deep simulate:--steps replay:--steps replay:--ranks",
    "it is written into the lake or plan once, and compared": "--ext --check-payload "
    "--accept-changes --input --seq-len --batch-size --tokenizer-file --eos",
    "it ends a run earlier": "--limit-steps",
}

# cells that say the same
SAME = {
    "HERE": "t5_cli/test_fork_lifecycle.py::test_a_fork_of_a_sealed_lake_by_a_mesh_in_an_announced_order",
    "SIDES": "a producer knows no view, and a view no producer",
    "NUMBERS": "a view is of step numbers, in which a fork goes on from its parent",
    "ENDS": "who reads is told that the lake was replaced, and ends, whatever was shown",
    "TROUBLE": "the follower says that the store was rolled back, whatever is shown (steps × rollback)",
    "PLACE": "a lake does not know where it is mounted",
    "WHOLE": "a step comes and goes with the files of all ranks",
    "TRIMS": "it trims a listing of the steps that are there, however they came to be",
    "AS_HOME": "a replica is read as the lake itself: it has the same steps and bytes",
    "BYTES": "a record's side is a function of its bytes and the plan",
}

TABLE = """
fork × steps: HERE
fork × show_last: NUMBERS
fork × order: HERE
fork × mesh: HERE
fork × groups: t0_pure/test_torch_save.py::test_a_fork_goes_on_from_a_checkpoint_of_its_parent_before_the_first_step_that_it_left_out
fork × reclaim: t5_cli/test_fork_lifecycle.py::test_parent_and_fork_let_go_of_each_other
fork × seal: HERE
fork × holdout: t5_cli/test_produce_unfit.py::test_both_sides_of_a_holdout_do_not_share_a_lake
fork × producers: t1_protocol/test_fork_kills.py::test_producers_go_back_to_the_cut_and_later_ones_are_gone
fork × lead: t1_protocol/test_lead.py::test_a_producer_does_not_wait_for_a_fork_of_its_lake
fork × rollback: a fork reads its parent's objects and no log: what a copy lacks is damage
fork × kill: t1_protocol/test_fork_kills.py::test_a_fork_killed_at_any_await_is_whole_or_no_lake_and_the_next_names_its_group
fork × replaced: t5_cli/test_fork_lifecycle.py::test_it_is_named_and_nobody_advises_to_drop_the_history
fork × namespaces: PLACE
fork × replica: t1_protocol/test_replicas.py::test_a_replica_of_a_fork_begins_behind_what_the_fork_shares
steps × show_last: t3_unmounted/view/test_tree.py::test_show_last_of_named_steps_counts_the_committed_ones
steps × order: t4_mount/test_announced_order.py::test_the_mount_says_where_the_order_begins_and_ends
steps × mesh: t4_mount/test_meshes.py::test_commands_that_take_a_mount_show_what_it_shows
steps × groups: t4_mount/test_steps.py::test_steps_behind_a_checkpoint_keep_their_names_so_that_a_data_set_keeps_its_length
steps × reclaim: t3_unmounted/reader/test_reader_bytes.py::test_reclaimed_steps_are_an_error_and_never_skipped
steps × seal: t3_unmounted/reader/test_reader_bytes.py::test_steps_beyond_the_end_of_a_sealed_lake_are_refused
steps × holdout: SIDES
steps × producers: SIDES
steps × lead: SIDES
steps × rollback: t1_protocol/test_reader_hazards.py::test_a_reader_of_a_store_that_was_rolled_back_says_so_and_nobody_waits
steps × kill: t4_mount/test_steps.py::test_waiting_readers_die_within_half_a_second
steps × replaced: ENDS
steps × namespaces: PLACE
steps × replica: AS_HOME
show_last × order: t4_mount/test_announced_order.py::test_the_mount_says_where_the_order_begins_and_ends
show_last × mesh: t4_mount/test_meshes.py::test_commands_that_take_a_mount_show_what_it_shows
show_last × groups: t3_unmounted/view/test_tree.py::test_show_last_of_named_steps_counts_the_committed_ones
show_last × reclaim: t3_unmounted/view/test_tree.py::test_show_last_of_named_steps_counts_the_committed_ones
show_last × seal: TRIMS
show_last × holdout: SIDES
show_last × producers: SIDES
show_last × lead: SIDES
show_last × rollback: TROUBLE
show_last × kill: TRIMS
show_last × replaced: ENDS
show_last × namespaces: PLACE
show_last × replica: AS_HOME
order × mesh: HERE
order × groups: t4_mount/test_announced_order.py::test_a_checkpoint_inside_a_shuffled_epoch_keeps_its_first_step
order × reclaim: a reclaim deletes what checkpoints released, and none inside an epoch does that (order × groups)
order × seal: HERE
order × holdout: SIDES
order × producers: SIDES
order × lead: SIDES
order × rollback: TROUBLE
order × kill: t3_unmounted/reader/test_torchdata.py::test_a_shuffled_resume_fetches_ahead_and_keeps_its_first_step
order × replaced: ENDS
order × namespaces: t4_mount/test_announced_order.py::test_another_user_reads_and_may_not_say_what_comes_next
order × replica: AS_HOME
mesh × groups: t3_unmounted/reader/test_elastic.py::test_a_checkpoint_of_one_size_resumes_with_another
mesh × reclaim: WHOLE
mesh × seal: WHOLE
mesh × holdout: SIDES
mesh × producers: SIDES
mesh × lead: SIDES
mesh × rollback: TROUBLE
mesh × kill: t5_cli/test_elastic_training.py::test_a_mesh_with_peers_comes_back_with_half_and_twice_as_many_data_ranks
mesh × replaced: ENDS
mesh × namespaces: PLACE
mesh × replica: AS_HOME
groups × reclaim: t1_protocol/test_groups_and_reclaim.py::test_hazard_10_a_group_changes_inside_every_await_of_a_reclaim
groups × seal: HERE
groups × holdout: a group keeps steps, of whichever side they are
groups × producers: a group keeps steps, whoever made them
groups × lead: t1_protocol/test_lead.py::test_a_hold_names_group_and_checkpoint_and_what_to_type
groups × rollback: t1_protocol/test_control_limits.py::test_a_checkpoint_beyond_everything_stops_reclaim_until_it_is_corrected
groups × kill: t1_protocol/test_reclaim_kills.py::test_a_group_writer_killed_at_any_await_never_loses_steps
groups × replaced: t2_stores/test_torch_hook.py::test_a_lake_that_was_replaced_gets_no_checkpoint_of_the_former
groups × namespaces: PLACE
groups × replica: t1_protocol/test_replicas.py::test_runs_that_read_the_replica_hold_the_lake_and_its_producers
reclaim × seal: t1_protocol/test_reclaim_kills.py::test_a_dry_run_on_a_sealed_lake
reclaim × holdout: a reclaim deletes steps, of whichever side they are
reclaim × producers: t2_stores/test_lifecycle.py::test_the_log_stays_short_and_producers_and_readers_go_on
reclaim × lead: t1_protocol/test_lead.py::test_live_bytes_stop_producers_until_a_reclaim_and_cost_no_request
reclaim × rollback: t1_protocol/test_reclaim_kills.py::test_a_reclaimer_under_which_the_lake_was_restored_deletes_nothing_live
reclaim × kill: t1_protocol/test_reclaim_kills.py::test_a_reclaim_killed_at_any_await_is_finished_by_the_next
reclaim × replaced: t1_protocol/test_reclaim_kills.py::test_who_knew_a_dropped_lake_does_nothing_to_the_one_that_was_made_in_its_place
reclaim × namespaces: PLACE
reclaim × replica: t1_protocol/test_replicas.py::test_a_reclaim_of_the_replica_deletes_nothing_that_its_log_will_name
seal × holdout: each side has a lake of its own (holdout × producers)
seal × producers: t1_protocol/test_producer_restart.py::test_a_sealed_lake_ends_producers_and_lets_no_new_ones_start
seal × lead: a sealed lake takes no step that could be held
seal × rollback: TROUBLE
seal × kill: t5_cli/test_produce_run.py::test_a_complete_plan_may_seal_its_lake
seal × replaced: ENDS
seal × namespaces: PLACE
seal × replica: t1_protocol/test_replicas.py::test_a_sealed_lake_is_copied_to_its_end
holdout × producers: t5_cli/test_produce_unfit.py::test_both_sides_of_a_holdout_do_not_share_a_lake
holdout × lead: the lead counts steps, of whichever side they are
holdout × rollback: BYTES
holdout × kill: BYTES
holdout × replaced: BYTES
holdout × namespaces: SIDES
holdout × replica: BYTES
producers × lead: t1_protocol/test_lead.py::test_several_producers_exceed_the_bound_by_what_each_appends_between_its_looks
producers × rollback: t1_protocol/test_another_history.py::test_hazard_13_a_producer_that_knows_a_longer_log_commits_nothing_behind_a_hole
producers × kill: t1_protocol/test_producer_restart.py::test_killed_at_any_await_and_restarted
producers × replaced: t1_protocol/test_commit_hazards.py::test_hazard_07_a_recreated_lake_is_noticed_and_never_written_to
producers × namespaces: SIDES
producers × replica: t1_protocol/test_replicas.py::test_nobody_else_commits_to_a_replica
lead × rollback: the lead is read from the log, which the producer follows (producers × rollback)
lead × kill: a producer keeps nothing of its lead: a restart reads it from the log
lead × replaced: a producer stops where the lake was replaced (producers × replaced)
lead × namespaces: SIDES
lead × replica: t1_protocol/test_replicas.py::test_an_archive_holds_what_is_not_copied_and_no_producer_counts_it
rollback × kill: a restart reads the log that is there
rollback × replaced: a copy that is put back has the lake's identity; another lake has not
rollback × namespaces: PLACE
rollback × replica: t1_protocol/test_replicas.py::test_a_replica_is_never_shortened_and_follows_no_other_history
kill × replaced: t3_unmounted/mount/test_ground.py::test_a_dead_cache_of_another_lake_at_the_same_mount_point_goes_at_once
kill × namespaces: t4_mount/test_endings.py::test_a_reader_in_another_mount_namespace_keeps_the_mount
kill × replica: t1_protocol/test_replicas.py::test_killed_at_any_await_it_names_nothing_that_is_not_there_and_the_next_goes_on
replaced × namespaces: PLACE
replaced × replica: t1_protocol/test_replicas.py::test_another_lake_at_the_url_is_not_copied
namespaces × replica: PLACE
"""

CELLS = {pair: SAME.get(cell, cell) for pair, _, cell in (line.partition(": ") for line in TABLE.strip().splitlines())}


@functools.cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def options_of_commands() -> dict[str, set[str]]:
    """Option → the commands that have it."""
    found: dict[str, set[str]] = {}
    for command in [*commands_of(app).values(), *commands_of(producing).values()]:
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name not in {"help", "version"}:
                option = next(name for name in parameter.opts if name.startswith("--"))
                found.setdefault(option, set()).add(command.name)
    return found


def test_every_two_features_have_a_cell():
    assert list(CELLS) == [f"{one} × {other}" for one, other in combinations(FEATURES, 2)]


@pytest.mark.parametrize("pair", CELLS)
def test_a_cell_names_a_test_that_is_there_or_says_why_there_is_none(pair):
    cell = CELLS[pair]
    path, is_test, name = cell.partition("::")
    if is_test:
        assert name in names_in(path), cell
    else:
        assert len(cell.split()) >= 3, "a reason is a sentence"


def test_the_untested_crossings_are_known():
    assert not [pair for pair, cell in CELLS.items() if cell.startswith("untested")]


def test_every_option_belongs_to_one_feature_or_is_apart_from_all():
    listed = [word for words in [*FEATURES.values(), *APART.values()] for word in words.split()]
    assert len(set(listed)) == len(listed)
    plain = {word for word in listed if word.startswith("--")}
    of_one = {word for word in listed if not word.startswith("--")}
    for option, commands in options_of_commands().items():
        named = {f"{command}:{option}" for command in commands} & of_one
        assert option in plain or len(named) == len(commands), f"{option} is in no row: which features does it meet?"
        plain.discard(option)
        of_one -= named
    assert not plain | of_one, "no command has it any more"
