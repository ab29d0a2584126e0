"""What benchmarks judge by: pace and stalls from a journal, and waits of a sleeping trainer."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest

from bench.slow_store import TokenBucket
from bench_train.accelerator import judge
from bench_train.peers import adapters
from bench_train.peers.catalogue import CATALOGUE
from bench_train.peers.job import Data, Order
from bench_train.peers.judgement import EXACT, Journal, Result, pace, resume
from bench_train.peers.runs import reason
from bench_train.peers.table import cells, markdown, verdicts


def journal(*, period_s, waits, batch=2, stopped=False):
    at, lines = 0.0, [json.dumps({"imported_s": 1.5, "cpu_s": 2.0})]
    for number, wait in enumerate(waits):
        at += wait
        ids = list(range(number * batch, (number + 1) * batch))
        lines.append(json.dumps({"at": at, "wait": wait, "ids": ids}))
        at += period_s
    return [line + "\n" for line in [*lines, json.dumps({"ended": True, "stopped": stopped, "cpu_s": 5.0})]]


def test_pace_counts_from_the_end_of_the_beginning():
    found = pace(Journal.parse(journal(period_s=0.4, waits=[3.0, 2.0, 0.1, 0.1, 0.1, 0.1])), beginning=2)
    assert found.first_s == pytest.approx(3.0)
    assert found.samples_per_s == pytest.approx(2 / 0.5)  # four batches of two in four times half a second
    assert found.stall == pytest.approx(0.1 / 0.5)


def test_a_beginning_longer_than_the_run_leaves_half_of_it_to_judge():
    found = pace(Journal.parse(journal(period_s=0.5, waits=[1.0, 1.0, 0.0, 0.0])), beginning=100)
    assert (found.samples_per_s, found.stall) == (pytest.approx(4.0), 0.0)


def test_a_run_of_one_batch_has_no_pace():
    found = pace(Journal.parse(journal(period_s=0.5, waits=[1.0])), beginning=10)
    assert math.isnan(found.samples_per_s)
    assert found.first_s == 1.0


def test_a_journal_cut_short_by_a_kill_has_its_whole_lines_and_no_end():
    lines = journal(period_s=0.1, waits=[0.0, 0.0, 0.0])[:-1]
    lines[-1] = lines[-1][:-4]
    found = Journal.parse(lines)
    assert found.ids == ((0, 1), (2, 3))
    assert found.cpu_s is None
    assert Journal.parse(journal(period_s=0.1, waits=[0.0])).cpu_s == 3.0  # without that of the imports
    assert Journal.parse(journal(period_s=0.1, waits=[0.0], stopped=True)).stopped
    assert not found.stopped


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([0, 1, 2], [3, 4, 5], "exact"),
        ([0, 1, 2], [3, 5, 4], "each once, other order"),
        ([1, 0, 2], [3, 4, 5], "each once, other order"),  # the run before the kill counts, too
        ([0, 1, 2], [4, 5], "1 lost"),
        ([0, 1, 2], [2, 3, 4, 5], "1 repeated"),
        ([0, 1, 2], [0, 1, 2, 3, 4, 5], "3 repeated"),
        ([0, 1, 2], [1, 4, 5], "1 lost, 1 repeated"),
        ([0, 1, 2], [3, 4, 5, 9], "1 foreign"),
        ([], [], "6 lost"),
    ],
)
def test_only_each_sample_once_in_the_undisturbed_order_is_exact(before, after, said):
    found = resume(range(6), before, after)
    assert str(found) == said
    assert (found == EXACT) == (said == "exact") == found.exact


def results():
    best = Result("fast", "text", samples_per_s=1000.0, stall=0.0, bytes_per_sample=100.0)
    best.resume_exact, best.resume_s = False, 0.01
    exact = Result("exact", "text", samples_per_s=500.0, stall=0.5, bytes_per_sample=200.0)
    exact.resume_exact, exact.resume_s = True, 0.5
    ours = Result("stepfs", "text", ours=True, samples_per_s=960.0, stall=0.04, bytes_per_sample=104.0)
    ours.resume, ours.resume_exact, ours.resume_s, ours.other_workers_exact = "exact", True, 0.5, True
    return best, exact, ours


def test_ours_is_held_against_the_best_of_each_row_and_its_resume_against_exact_ones_only():
    rows = verdicts("text", results())
    assert [row.held for row in rows] == [True] * 5
    assert rows[3].ratio == 1.0


@pytest.mark.parametrize(
    ("name", "value", "missed"), [
        ("samples_per_s", 940.0, 0), ("stall", 0.06, 1), ("bytes_per_sample", 106.0, 2), ("resume_s", 0.53, 3),
        ("resume_exact", False, 3), ("other_workers_exact", False, 4),
    ],
)  # fmt: skip
def test_ours_misses_what_is_more_than_five_percent_behind(name, value, missed):
    best, exact, ours = results()
    setattr(ours, name, value)
    held = [row.held for row in verdicts("text", [best, exact, ours])]
    assert held == [number != missed for number in range(5)]


def test_a_peer_that_could_not_be_had_is_a_row_with_its_reason_and_no_rival():
    absent = Result("absent", "text", trouble="skipped: no such package")
    assert cells(absent)[0] == "absent"
    assert "skipped: no such package" in cells(absent)
    assert "skipped: no such package" in markdown("text", [absent])
    assert len(verdicts("text", [absent, *results()])) == 5
    assert verdicts("text", [absent]) == []


def test_the_reason_of_a_failure_is_the_line_that_names_the_exception():
    said = "Traceback:\n  File x\nValueError: bad state\n\ndetails {\n    HttpError: inner\n}\n"
    assert reason(said) == "ValueError: bad state"
    assert reason("Killed\n") == "Killed"
    assert reason("") == ""


def test_an_order_survives_its_travel():
    order = Order("stepfs", "train", Data("text", "/corpus", 4, 2), "bucket", "place", workers=3, resume=True)
    assert Order.of(order.text()) == order
    assert order.data.samples == 8


@pytest.mark.parametrize("peer", CATALOGUE.values(), ids=lambda peer: peer.name)
def test_an_adapter_imports_its_library_inside_functions(peer):
    tree = ast.parse(Path(adapters.__path__[0], f"{peer.module}.py").read_text(encoding="utf-8"))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    foreign = {requirement.partition("==")[0] for requirement in peer.requirements}
    assert not imported & (foreign | {"streaming", "stepfs", "stepfs_producer", "trio"})
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named |= {name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {"imports", "write", "train"} <= named
    assert all("==" in requirement for requirement in peer.requirements)


def test_connections_share_one_bandwidth_in_the_order_they_ask():
    bucket = TokenBucket(100.0, burst_s=0.0)
    assert [bucket.reserve(50, now=10.0) for _ in range(3)] == [10.5, 11.0, 11.5]
    assert bucket.reserve(10, now=11.0) == pytest.approx(11.6)
    assert bucket.reserve(10, now=20.0) == pytest.approx(20.1)  # what was idle is not made up for


def test_a_burst_is_bounded():
    bucket = TokenBucket(100.0, burst_s=0.5)
    assert bucket.reserve(100, now=10.0) == pytest.approx(10.5)
    assert bucket.reserve(100, now=10.0) == pytest.approx(11.5)


def test_a_wait_counts_beyond_its_copy_and_the_beginning_apart():
    waits = [1.1, 0.6, 0.1, 0.1, 0.3, 0.1]
    found = judge(waits, [0.1] * 6, period_s=0.5, beginning=2)
    assert found.beginning_s == pytest.approx(1.5)
    assert found.stall == pytest.approx(0.2 / (0.2 + 4 * 0.5))
    assert found.longest_s == pytest.approx(0.2)
    assert found.copy_share == pytest.approx(0.2)
