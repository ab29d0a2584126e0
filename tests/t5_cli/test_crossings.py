"""Features on both axes: each pair that shares a state names the test that crosses the two, or the code that keeps them apart.

Nearly all defects that were found late lay between two features, each of which had its tests. So a new option belongs
to a feature below, and a new feature says what it touches, and has a cell with each other that touches the same, before
it is done. What a feature's own modules import is held against what it says.
"""

from __future__ import annotations

import ast
import functools
import re
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
from programs import commands_of

from stepfs.cli.app import app
from stepfs_producer.cli.app import app as producing

TESTS = Path(__file__).parents[1]
ROOMS = [TESTS.parent / "fs/stepfs", TESTS.parent / "producer/stepfs_producer"]

# state → the modules that have it: who imports one of them touches it
STATES = {
    "log": "lake/log/append.py lake/log/reader.py lake/log/index.py",  # the commits, seal and head
    "records": "lake/control.py",  # of groups, holds and the floor
    "objects": "lake/origins.py lake/reclaim/sweep.py format/tgb.py",  # the data, in whichever store it lies
    "names": "view/tree.py",  # what readers are shown
    "daemon": "mount/state.py data/announced_orders.py checkpoints/watch.py",  # what lives in one and is handed on, or is lost
    "place": "mount/host/mount_points.py mount/host/abort.py",  # mount tables, namespaces, users
    "position": "plan/step.py lake/kept_plans.py",  # where a plan is, with plan and listings
    "samples": "sources/listing.py sources/reading.py transforms/documents.py",  # records, and the bytes of them
}


class Feature(NamedTuple):
    """`options` that choose it, of one command or of all that have them; the states that it `touches`; its own modules."""

    options: str
    touches: str
    home: str = ""


FEATURES = {
    "fork": Feature(
        "fork:--skip fork:--until fork:--rewind fork:--until-damage", "log objects position records", "lake/fork.py"
    ),
    "steps": Feature("mount:--steps mount:--wait", "names"),
    "order": Feature("", "names daemon", "data/announced_orders.py shuffled_steps.py"),  # `ShuffledSteps`, `.stepfs/order`
    "mesh": Feature(
        "mount:--ranks mount:--world mount:--mesh --slices --data-ranks --micro-batches --cp --rank --micro --beside",
        "names", "view/ranks.py format/mesh.py",
    ),
    "groups": Feature("--group --checkpoint --keep --resumed --drop --new-group --pace", "records names", "checkpoints/record.py"),
    "watched": Feature("--checkpoint-dir --next-step", "records daemon", "checkpoints/watch.py checkpoints/formats.py"),
    "retire": Feature("", "records daemon"),
    "reclaim": Feature(
        "--dry-run --every --max-percent --grace", "records objects log names", "lake/reclaim/run.py"
    ),
    "seal": Feature("--seal", "log names"),
    "holdout": Feature("--holdout", "position samples"),
    "producers": Feature("--producer-id --shard", "log objects position", "commit/loop.py commit/producer.py"),
    "lead": Feature("--max-lead --max-live-bytes", "log records", "commit/backpressure.py"),
    "rollback": Feature("verify:--repair", "log records daemon"),  # of the store, to a copy
    "kill": Feature("--cache-dir --cache-size --foreground --recover", "log daemon place records"),
    "handover": Feature("--replace --no-group --spare", "daemon place names", "mount/keeper/process.py"),
    "replaced": Feature("", "log daemon records"),  # another lake under the URL, of a lake or of a fork's parent
    "namespaces": Feature("--allow-other", "place", "mount/host/mount_points.py"),  # bind mounts, pods, other users
    "replica": Feature("--from --keep-all --check", "log objects records", "lake/replicate.py"),
    "replica_fork": Feature("", "log objects position"),  # a fork of a replica
    "near": Feature("--near", "objects", "data/near.py"),
    "accepted": Feature("--accept-changes", "position samples"),
    "past": Feature(  # find, replay, lineage, report
        "--to --record --plan-dir", "position samples log",
        "run/history/find.py run/history/replay.py run/history/lineage.py run/history/texts.py report/from_lake.py",
    ),
    "chats": Feature("", "position samples", "transforms/chat.py transforms/pairs.py transforms/fim.py"),  # and pairs, FIM
    "csi": Feature("", "place daemon", "csi/node.py csi/holder.py"),
}  # fmt: skip

# why an option is of no feature → the options
APART = {
    "it says the same in another form": "--json --watch --bundle --metrics-port --metrics-address --text "
    "--log-format --ids --full --out --no-text --capacity",
    "it says how a store or a machine is reached": "--endpoint-url --engine --ray-address --workers --wait-for-lake",
    "it bounds resources, and changes no byte": "--memory --prefetch --prime --poll --steps-per-second",
    "it chooses what one command looks at": "--step --source --file --samples "
    "--no-sources --deep replay:--steps replay:--ranks",
    "it is written into the lake or plan once, and compared": "--ext --check-payload "
    "--input --seq-len --batch-size --tokenizer-file --eos",
    "it ends a run earlier": "--limit-steps",
    "it says where and how long one command writes down what it or others do": "trace:--out trace:--seconds trace:--merge run:--trace",
}

# cells that say the same: tests, and code that keeps features apart
HERE = "t5_cli/test_fork_lifecycle.py::test_a_fork_of_a_sealed_lake_by_a_mesh_in_an_announced_order"
REFUSED = "t4_mount/test_successors.py::test_what_cannot_take_over_says_why_and_the_mount_is_as_it_was"
SAME = {
    "HERE": HERE,
    "REFUSED": REFUSED,
    "PACKED": "independent: commit/producer.py packs a position unread, and plan/step.py alone reads it",
    "PARENT": "independent: lake/fork.py takes a replica for a parent like any lake, so it is the fork's cell",
    "OWN": "independent: checkpoints/record.py writes into the control records of the mounted lake, however it was made",
    "OTHER_ID": "independent: format/keys.py puts log and records below the lake's id: another lake has others",
    "TOLD": "independent: follow/follower.py ends or warns before a view, an order or a seal is asked",
    "WHOLE": "independent: lake/reclaim/sweep.py deletes objects of whole steps, and a seal ends whole steps",
    "TRIMS": "independent: view/tree.py trims a listing of the steps that are there, however they came to be",
    "ONE_LOOK": "independent: run/history/positions.py reads the log that is there at one look, and writes nothing",
    "COMMAND": "independent: csi/holder.py runs `stepfs mount` and looks at no lake: it is the mount's own cell",
    "BYTES": "independent: sources/reading.py deals a record to a side by its bytes alone",
}

TABLE = """
fork × steps: HERE
fork × order: HERE
fork × mesh: HERE
fork × groups: t0_pure/test_torch_save.py::test_a_fork_goes_on_from_a_checkpoint_of_its_parent_before_the_first_step_that_it_left_out
fork × watched: OWN
fork × retire: t1_protocol/test_fork_kills.py::test_a_reclaim_of_a_fork_revives_no_group_that_another_has_retired
fork × reclaim: t5_cli/test_fork_lifecycle.py::test_parent_and_fork_let_go_of_each_other
fork × seal: HERE
fork × holdout: t5_cli/test_produce_unfit.py::test_both_sides_of_a_holdout_do_not_share_a_lake
fork × producers: t1_protocol/test_fork_kills.py::test_producers_go_back_to_the_cut_and_later_ones_are_gone
fork × lead: t1_protocol/test_lead.py::test_a_producer_does_not_wait_for_a_fork_of_its_lake
fork × rollback: t3_unmounted/reader/test_other_history.py::test_a_state_whose_last_step_was_reclaimed_or_that_is_of_the_parent_resumes
fork × kill: t1_protocol/test_fork_kills.py::test_a_fork_killed_at_any_await_is_whole_or_no_lake_and_the_next_names_its_group
fork × replaced: t5_cli/test_fork_lifecycle.py::test_it_is_named_and_nobody_advises_to_drop_the_history
fork × replica: t1_protocol/test_replicas.py::test_a_replica_of_a_fork_begins_behind_what_the_fork_shares
fork × replica_fork: PARENT
fork × near: t3_unmounted/reader/test_lake.py::test_a_fork_whose_parent_is_gone_is_read_from_a_copy_of_the_parents_objects
fork × accepted: PACKED
fork × past: t5_cli/test_plan_lineage.py::test_a_fork_knows_its_own_steps_and_names_its_parent
fork × chats: PACKED
steps × order: t4_mount/test_announced_order.py::test_the_mount_says_where_the_order_begins_and_ends
steps × mesh: t4_mount/test_meshes.py::test_commands_that_take_a_mount_show_what_it_shows
steps × groups: t4_mount/test_steps.py::test_steps_behind_a_checkpoint_keep_their_names_so_that_a_data_set_keeps_its_length
steps × reclaim: t3_unmounted/reader/test_reader_bytes.py::test_reclaimed_steps_are_an_error_and_never_skipped
steps × seal: t3_unmounted/reader/test_reader_bytes.py::test_steps_beyond_the_end_of_a_sealed_lake_are_refused
steps × rollback: t1_protocol/test_reader_hazards.py::test_a_reader_of_a_store_that_was_rolled_back_says_so_and_nobody_waits
steps × kill: t4_mount/test_steps.py::test_waiting_readers_die_within_half_a_second
steps × handover: REFUSED
order × mesh: HERE
order × groups: t4_mount/test_announced_order.py::test_a_checkpoint_inside_a_shuffled_epoch_keeps_its_first_step
order × watched: t0_pure/test_order_hint.py::test_a_watcher_doubts_a_checkpoint_inside_a_shuffled_epoch
order × retire: independent: data/announced_orders.py knows no group, and a retired one needs nothing
order × reclaim: t4_mount/test_announced_order.py::test_a_checkpoint_inside_a_shuffled_epoch_keeps_its_first_step
order × seal: HERE
order × rollback: TOLD
order × kill: t3_unmounted/reader/test_torchdata.py::test_a_shuffled_resume_fetches_ahead_and_keeps_its_first_step
order × handover: t4_mount/test_followers.py::test_what_was_decided_about_an_order_outlives_a_daemon_that_ends_at_once
order × replaced: TOLD
order × namespaces: t4_mount/test_announced_order.py::test_another_user_reads_and_may_not_say_what_comes_next
order × csi: COMMAND
mesh × groups: t3_unmounted/reader/test_elastic.py::test_a_checkpoint_of_one_size_resumes_with_another
mesh × reclaim: WHOLE
mesh × seal: WHOLE
mesh × kill: t5_cli/test_elastic_training.py::test_a_mesh_with_peers_comes_back_with_half_and_twice_as_many_data_ranks
mesh × handover: REFUSED
groups × watched: t3_unmounted/mount/test_group.py::test_the_mount_with_rank_0_watches_for_all
groups × retire: t1_protocol/test_groups_and_reclaim.py::test_a_retired_group_does_not_count_and_without_groups_nothing_goes
groups × reclaim: t1_protocol/test_groups_and_reclaim.py::test_hazard_10_a_group_changes_inside_every_await_of_a_reclaim
groups × seal: HERE
groups × lead: t1_protocol/test_lead.py::test_a_hold_names_group_and_checkpoint_and_what_to_type
groups × rollback: t1_protocol/test_control_limits.py::test_a_checkpoint_beyond_everything_stops_reclaim_until_it_is_corrected
groups × kill: t1_protocol/test_reclaim_kills.py::test_a_group_writer_killed_at_any_await_never_loses_steps
groups × handover: t4_mount/test_successors.py::test_everything_but_the_view_may_change_and_the_cache_is_kept
groups × replaced: t2_stores/test_torch_hook.py::test_a_lake_that_was_replaced_gets_no_checkpoint_of_the_former
groups × replica: t1_protocol/test_replicas.py::test_runs_that_read_the_replica_hold_the_lake_and_its_producers
watched × retire: t1_protocol/test_watched_again.py::test_deleting_the_checkpoints_of_a_retired_group_does_not_bring_it_back
watched × reclaim: t1_protocol/test_watched_again.py::test_a_first_look_at_nothing_but_reclaimed_checkpoints_proves_nothing
watched × lead: t5_cli/test_training_lifecycle.py::test_a_training_loop_that_keeps_its_last_two_checkpoints
watched × rollback: t4_mount/test_followers.py::test_a_watched_directory_records_nothing_while_the_lake_has_another_history
watched × kill: t4_mount/test_followers.py::test_a_checkpoint_that_was_recorded_by_hand_stays_beside_those_of_a_directory
watched × handover: t4_mount/test_followers.py::test_a_checkpoint_that_was_recorded_by_hand_stays_beside_those_of_a_directory
watched × replaced: OTHER_ID
watched × replica: OWN
watched × csi: t4_mount/test_csi.py::test_attributes_are_options_of_mount
retire × reclaim: t1_protocol/test_groups_and_reclaim.py::test_a_retired_group_does_not_count_and_without_groups_nothing_goes
retire × lead: t1_protocol/test_lead.py::test_a_producer_goes_on_when_the_group_that_holds_it_is_retired
retire × rollback: t1_protocol/test_another_history.py::test_who_writes_control_records_notices_that_the_sequence_went_back
retire × kill: t4_mount/test_followers.py::test_a_group_that_was_retired_stays_retired
retire × handover: t4_mount/test_followers.py::test_a_group_that_was_retired_stays_retired
retire × replaced: OTHER_ID
retire × replica: t1_protocol/test_replica_holds.py::test_a_run_at_an_archive_counts_for_producers_until_it_ends
retire × csi: COMMAND
reclaim × seal: t1_protocol/test_reclaim_kills.py::test_a_dry_run_on_a_sealed_lake
reclaim × producers: t2_stores/test_lifecycle.py::test_the_log_stays_short_and_producers_and_readers_go_on
reclaim × lead: t1_protocol/test_lead.py::test_live_bytes_stop_producers_until_a_reclaim_and_cost_no_request
reclaim × rollback: t1_protocol/test_reclaim_kills.py::test_a_reclaimer_under_which_the_lake_was_restored_deletes_nothing_live
reclaim × kill: t1_protocol/test_reclaim_kills.py::test_a_reclaim_killed_at_any_await_is_finished_by_the_next
reclaim × handover: t4_mount/test_followers.py::test_steps_that_were_reclaimed_stay_away_at_the_next_daemon_and_open_ones_are_read_on
reclaim × replaced: t1_protocol/test_reclaim_kills.py::test_who_knew_a_dropped_lake_does_nothing_to_the_one_that_was_made_in_its_place
reclaim × replica: t1_protocol/test_replicas.py::test_a_reclaim_of_the_replica_deletes_nothing_that_its_log_will_name
reclaim × replica_fork: PARENT
reclaim × near: t3_unmounted/data/test_data_near.py::test_absent_and_damaged_objects_alone_come_from_the_lake
reclaim × past: t5_cli/test_plan_lineage.py::test_a_reclaimed_step_has_no_lineage
seal × producers: t1_protocol/test_producer_restart.py::test_a_sealed_lake_ends_producers_and_lets_no_new_ones_start
seal × lead: t1_protocol/test_lead.py::test_a_producer_that_is_held_notices_the_end_of_the_lake
seal × rollback: TOLD
seal × kill: t5_cli/test_produce_run.py::test_a_complete_plan_may_seal_its_lake
seal × handover: t4_mount/test_followers.py::test_named_steps_beyond_the_end_of_a_lake_that_was_sealed_meanwhile_stay_shown
seal × replaced: OTHER_ID
seal × replica: t1_protocol/test_replicas.py::test_a_sealed_lake_is_copied_to_its_end
seal × replica_fork: PARENT
seal × past: ONE_LOOK
holdout × producers: t5_cli/test_produce_unfit.py::test_both_sides_of_a_holdout_do_not_share_a_lake
holdout × replica_fork: PACKED
holdout × accepted: BYTES
holdout × past: t5_cli/test_plan_lineage.py::test_the_held_out_side_is_replayed_as_it_was
holdout × chats: BYTES
producers × lead: t1_protocol/test_lead.py::test_several_producers_exceed_the_bound_by_what_each_appends_between_its_looks
producers × rollback: t1_protocol/test_another_history.py::test_hazard_13_a_producer_that_knows_a_longer_log_commits_nothing_behind_a_hole
producers × kill: t1_protocol/test_producer_restart.py::test_killed_at_any_await_and_restarted
producers × replaced: t1_protocol/test_commit_hazards.py::test_hazard_07_a_recreated_lake_is_noticed_and_never_written_to
producers × replica: t1_protocol/test_replicas.py::test_nobody_else_commits_to_a_replica
producers × replica_fork: t5_cli/test_replicate.py::test_a_fork_of_the_replica_goes_on_when_the_lake_is_gone
producers × near: independent: data/near.py reads for readers alone, and a producer reads no data
producers × accepted: t5_cli/test_produce_text.py::test_what_is_advised_where_a_file_is_gone_is_accepted_and_nothing_comes_twice
producers × past: t5_cli/test_plan_lineage.py::test_the_steps_of_two_producers_are_told_apart
producers × chats: PACKED
lead × rollback: independent: commit/backpressure.py delays an append, whose commit looks behind itself (producers × rollback)
lead × kill: independent: commit/backpressure.py keeps nothing: the next life reads head and groups
lead × replaced: t1_protocol/test_lead.py::test_a_producer_that_is_held_notices_the_end_of_the_lake
lead × replica: t1_protocol/test_replicas.py::test_an_archive_holds_what_is_not_copied_and_no_producer_counts_it
lead × replica_fork: PARENT
lead × past: ONE_LOOK
rollback × kill: t4_mount/test_followers.py::test_a_mount_shows_one_history
rollback × handover: t4_mount/test_followers.py::test_a_mount_shows_one_history
rollback × replaced: independent: lake/identity.py tells another lake by its id, which a copy that is put back has, too
rollback × replica: t1_protocol/test_replicas.py::test_a_replica_is_never_shortened_and_follows_no_other_history
rollback × replica_fork: PARENT
rollback × past: ONE_LOOK
rollback × csi: COMMAND
kill × handover: t4_mount/test_successors.py::test_a_daemon_that_dies_before_it_serves_leaves_the_mount_to_the_one_before
kill × replaced: t3_unmounted/mount/test_ground.py::test_a_dead_cache_of_another_lake_at_the_same_mount_point_goes_at_once
kill × namespaces: t4_mount/test_endings.py::test_a_reader_in_another_mount_namespace_keeps_the_mount
kill × replica: t1_protocol/test_replicas.py::test_killed_at_any_await_it_names_nothing_that_is_not_there_and_the_next_goes_on
kill × replica_fork: PARENT
kill × past: ONE_LOOK
kill × csi: t4_mount/test_csi_deaths.py::test_readers_do_not_see_that_the_daemon_of_a_volume_is_killed
handover × replaced: REFUSED
handover × namespaces: t4_mount/test_successors.py::test_a_user_without_rights_replaces_and_recovers_and_root_may_not
handover × csi: t4_mount/test_csi_deaths.py::test_readers_do_not_see_that_the_plugin_is_killed
replaced × replica: t1_protocol/test_replicas.py::test_another_lake_at_the_url_is_not_copied
replaced × replica_fork: PARENT
replaced × past: ONE_LOOK
replaced × csi: COMMAND
namespaces × csi: t4_mount/test_csi_deaths.py::test_a_container_that_follows_the_hosts_mounts_is_served_again_without_a_restart
replica × replica_fork: t5_cli/test_replicate.py::test_a_fork_of_the_replica_goes_on_when_the_lake_is_gone
replica × near: t3_unmounted/data/test_data_near.py::test_a_copy_that_begins_later_is_waited_for_soon
replica × past: t1_protocol/test_replicas.py::test_plans_are_there_before_the_epochs_that_name_them
replica_fork × near: PARENT
replica_fork × accepted: PACKED
replica_fork × past: PARENT
replica_fork × chats: PACKED
accepted × past: t5_cli/test_accepted_files.py::test_what_was_read_before_files_changed_is_found_in_its_steps
accepted × chats: t5_cli/test_produce_run.py::test_a_source_that_is_not_the_one_of_before_is_refused_by_name
past × chats: t5_cli/test_plan_chats.py::test_pairs_stay_together_and_a_text_is_found_again
"""

CELLS = {pair: SAME.get(cell, cell) for pair, _, cell in (line.partition(": ") for line in TABLE.strip().splitlines())}


def module(path: str) -> Path:
    return next(room / path for room in ROOMS if (room / path).is_file())


def imports_of(path: str) -> set[str]:
    """The modules of the two packages that a module imports, as paths."""
    found = set[str]()
    for node in ast.walk(ast.parse(module(path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stepfs"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.partition(".")[2].replace(".", "/") + ".py" for name in names}
    return found


@functools.cache
def functions_in(path: str) -> dict[str, str]:
    """Name → its decorators."""
    tree = ast.parse((TESTS / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in functions}


def test_every_two_features_that_touch_the_same_have_a_cell():
    pairs = list(combinations(FEATURES, 2))
    order = [f"{one} × {other}" for one, other in pairs]
    assert list(CELLS) == [pair for pair in order if pair in CELLS], "in the order of the features, each once"
    need = {
        f"{one} × {other}"
        for one, other in pairs
        if {*FEATURES[one].touches.split()} & {*FEATURES[other].touches.split()}
    }
    assert need <= CELLS.keys(), "what touches the same state can harm the other"
    assert all("::" in CELLS[pair] for pair in CELLS.keys() - need), "who touches nothing in common needs no reason"


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_says_which_states_its_own_modules_import(feature):
    assert {*FEATURES[feature].touches.split()} <= STATES.keys()
    home = FEATURES[feature].home.split()
    known = {*home}.union(*map(imports_of, home)) if home else set[str]()
    touched = {state for state, owners in STATES.items() if known & {*owners.split()}}
    assert touched <= {*FEATURES[feature].touches.split()}
    assert all(module(path) for owners in STATES.values() for path in owners.split())


@pytest.mark.parametrize("pair", CELLS)
def test_a_cell_names_a_test_that_is_there_or_the_code_that_keeps_the_two_apart(pair):
    path, is_test, name = CELLS[pair].partition("::")
    if is_test:
        assert name in functions_in(path), CELLS[pair]
    else:
        assert path.startswith("independent: ")
        assert [module(named) for named in re.findall(r"[\w/]+\.py", path)], "a reason names the code"


def test_no_crossing_is_known_to_be_wrong():
    def fails(cell: str) -> bool:
        path, _, name = cell.partition("::")
        return bool(name) and "xfail" in functions_in(path)[name]

    assert [pair for pair in CELLS if fails(CELLS[pair])] == []


def options_of_commands() -> dict[str, set[str]]:
    """Option → the commands that have it."""
    found: dict[str, set[str]] = {}
    for command in [*commands_of(app).values(), *commands_of(producing).values()]:
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name not in {"help", "version"}:
                option = next(name for name in parameter.opts if name.startswith("--"))
                found.setdefault(option, set()).add(command.name)
    return found


def test_every_option_belongs_to_one_feature_or_is_apart_from_all():
    listed = [
        word for words in [*(one.options for one in FEATURES.values()), *APART.values()] for word in words.split()
    ]
    assert len(set(listed)) == len(listed)
    plain = {word for word in listed if word.startswith("--")}
    of_one = {word for word in listed if not word.startswith("--")}
    for option, commands in options_of_commands().items():
        named = {f"{command}:{option}" for command in commands} & of_one
        assert option in plain or len(named) == len(commands), f"{option} is in no row: which features does it meet?"
        plain.discard(option)
        of_one -= named
    assert not plain | of_one, "no command has it any more"
