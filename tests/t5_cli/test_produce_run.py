"""`stepfs-produce run`: a plan becomes steps, whatever ends the command between them, and no mistake fences anybody."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import json_schemas
import numpy as np
import pytest
from committed import committed
from forked import Forked
from lakes import stepfs
from payload_samples import npy
from plans import PLAN, plan_in, run
from produced_text import PROGRAM

from stepfs_producer import Producer

STEPS = 60
PAUSE_S = 0.02  # between two looks: without one, looking takes the core that the command needs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[bytes]]]:
    """The first steps of the plan, by a run that nothing disturbs."""
    directory = tmp_path_factory.mktemp("undisturbed")
    lake = f"file://{directory}/lake"
    assert run(plan_in(directory), lake, "--limit-steps", STEPS).returncode == 0
    return committed(lake)


def test_a_run_goes_on_where_the_last_one_ended(plan: Path, file_url: str, undisturbed) -> None:
    parted = file_url
    first = run(plan, parted, "--limit-steps", 5, "--json")
    second = run(plan, parted, "--limit-steps", 12, "--json")
    assert committed(parted) == undisturbed[:12]
    assert [one.document["run"]["steps"] for one in (first, second)] == [5, 7]
    summary = second.document
    json_schemas.check("produce-run", summary)
    assert summary["total"]["steps"] == 12
    assert summary["ending"] == "limit"
    assert abs(summary["sources"]["code"]["share"] - 0.3) < 0.02
    assert sum(one["tokens"] for one in summary["sources"].values()) == summary["run"]["tokens"]


def test_a_complete_plan_may_seal_its_lake(plan: Path, file_url: str) -> None:
    plan.write_text(PLAN + "until: {exhausted: first}\ndefaults: {epochs: 1}\n")
    done = run(plan, file_url, "--seal")
    assert done.returncode == 0, done.stderr
    assert "exhausted; the lake is sealed" in done.stdout
    before = stepfs("status", file_url, "--json").document
    again = run(plan, file_url, "--seal")
    assert (again.returncode, again.stderr) == (0, ""), "a Job repeats its command"
    assert again.stdout.endswith("is exhausted; sealed, nothing to do\n")
    assert stepfs("status", file_url, "--json").document == before, "no epoch was taken"
    plan.write_text(PLAN + "until: {exhausted: first}\ndefaults: {epochs: 2}\n")
    for options in (("--accept-changes",), ("--accept-changes", "--seal"), ("--producer-id", "other")):
        more = run(plan, file_url, *options)
        assert (more.returncode, "the lake is sealed" in more.stderr) == (4, True), "there are steps to make"
    assert stepfs("status", file_url, "--json").document == before


def test_a_changed_plan_shows_its_changes_and_waits_for_consent(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 3).returncode == 0
    plan.write_text(PLAN.replace("code: 30", "code: 35"))
    refused = run(plan, file_url, "--limit-steps", 4)
    assert refused.returncode == 4
    assert "mix[0].weights.code: 30 → 35" in refused.stderr
    assert "--accept-changes" in refused.stderr
    assert run(plan, file_url, "--limit-steps", 4, "--accept-changes").returncode == 0
    assert run(plan, file_url, "--limit-steps", 5).returncode == 0


def test_a_source_that_is_not_the_one_of_before_is_refused_by_name(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 3).returncode == 0
    plan.write_text(PLAN.replace("format: text", "format: text, shuffle: none"))
    refused = run(plan, file_url, "--limit-steps", 4, "--accept-changes")
    assert (refused.returncode, "source prose" in refused.stderr) == (4, True)
    assert "new name" in refused.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), "gone"),
        (lambda path: path.write_text(path.read_text()[:-40]), "shorter"),
        (lambda path: path.write_text("PROSE" + path.read_text()[5:]), "begins otherwise"),
    ],
    ids=["gone", "shorter", "other"],
)
def test_a_file_that_changed_since_the_plan_began_is_refused_by_name(plan, file_url, change, said):
    (plan.parent / "more.txt").write_text("one more line\n")
    plan.write_text(PLAN.replace("prose.txt", "[prose.txt, more.txt]"))
    assert run(plan, file_url, "--limit-steps", 3).returncode == 0
    change(plan.parent / "prose.txt")
    refused = run(plan, file_url, "--limit-steps", 4)
    assert refused.returncode in {3, 4}
    assert "prose.txt" in refused.stderr
    assert said in refused.stderr or "no such file" in refused.stderr


def test_another_shape_of_lake_and_another_pipeline_are_refused(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    plan.write_text(PLAN.replace("dp=2", "dp=3"))
    assert (refused := run(plan, file_url)).returncode == 4
    assert "2 slices" in refused.stderr
    plan.write_text(PLAN)
    with Producer(file_url, producer_id="mine") as producer:
        epoch = producer.epoch
        arrays = npy(np.zeros((4, 1, 512), np.int32))  # the lake says what its slices hold
        producer.append([arrays, arrays], position={"pipeline": "other"})
    refused = run(plan, file_url, "--producer-id", "mine")
    assert (refused.returncode, "another pipeline" in refused.stderr) == (4, True)
    with Producer(file_url, producer_id="mine") as producer:
        assert producer.epoch == epoch + 1  # nobody was fenced in between


def test_mistakes_end_in_one_line(plan: Path, file_url: str) -> None:
    assert run(plan.with_name("absent.yaml"), file_url).returncode == 3
    plan.write_text(PLAN.replace("format: text", "format: txt"))
    wrong = run(plan, file_url)
    assert (wrong.returncode, "plan.yaml:5:" in wrong.stderr) == (2, True)
    plan.write_text(PLAN)
    poor = run(plan, file_url, "--memory", "1M")
    assert (poor.returncode, "--memory" in poor.stderr) == (2, True)
    assert len(poor.stderr.strip().splitlines()) == 1


def workers_of(pid: int) -> list[int]:
    """Its worker processes; each is a child of some thread of it."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, thread.read_text().split())
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL]
)  # SIGTERM: below
def test_any_ending_leaves_whole_steps_and_no_process(plan, tmp_path, number, undisturbed):
    lake = f"file://{tmp_path}/ended"
    command = [PROGRAM, "run", str(plan), lake, "--workers", "1", "--steps-per-second", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "ended"
    while process.poll() is None and not list(log.glob("*/log/*2")):
        time.sleep(PAUSE_S)
    children = workers_of(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    expected = -9 if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected, err
    assert children
    for child in children:
        while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
            time.sleep(PAUSE_S)
    done = len(committed(lake))
    assert done >= 2
    assert run(plan, lake, "--limit-steps", done + 3).returncode == 0
    assert committed(lake) == undisturbed[: done + 3]


@pytest.mark.nightly
def test_a_second_process_of_the_same_id_fences_the_first(plan: Path, tmp_path: Path, undisturbed) -> None:
    lake = f"file://{tmp_path}/fenced"
    with Forked("stepfs_producer", "run", plan, lake, "--workers", 1, "--steps-per-second", 20) as first:
        while first.poll() is None and not list((tmp_path / "fenced").glob("*/log/*2")):
            time.sleep(PAUSE_S)
        assert run(plan, lake, "--limit-steps", 40).returncode == 0
        _, err = first.communicate()
    assert first.returncode == 7, err
    assert "Traceback" not in err
    assert committed(lake) == undisturbed[:40]


@pytest.mark.nightly
def test_killed_workers_cost_no_step_and_change_none(plan: Path, file_url: str, undisturbed) -> None:
    lake = file_url
    command = [PROGRAM, "run", str(plan), lake, "--workers", "1", "--limit-steps", "40"]
    process = subprocess.Popen([*command, "--steps-per-second", "20"], stderr=subprocess.PIPE, text=True)
    killed = 0
    while process.poll() is None:
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in workers_of(process.pid)[: 3 - killed]:
                os.kill(child, signal.SIGKILL)
                killed += 1
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert killed == 3
    assert committed(lake) == undisturbed[:40]


def test_metrics_name_every_source_until_a_signal_ends_it(plan: Path, file_url: str, undisturbed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["run", plan, file_url, "--workers", 1, "--steps-per-second", 50, "--metrics-port", port]
    text = ""
    with Forked("stepfs_producer", *words) as process:
        while "stepfs_produce_steps_total" not in text or "stepfs_produce_steps_total 0.0" in text:
            assert process.poll() is None
            time.sleep(PAUSE_S)
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    assert (steps := committed(file_url)) == undisturbed[: len(steps)]
    for source in ("code", "prose"):
        for name in ("source_tokens_total", "source_wanted_tokens_total", "source_ahead_tokens"):
            assert f'stepfs_produce_{name}{{source="{source}"}}' in text
    assert "stepfs_produce_planning_seconds_total" in text


def test_lines_are_objects_if_asked(plan: Path, file_url: str, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stepfs.cli.live.LINE_EVERY_S", 0.001)
        done = run(plan, file_url, "--limit-steps", 2, "--log-format", "json")
    assert done.returncode == 0
    *_, line = map(json.loads, done.err.splitlines())
    assert (line["level"], line["logger"], line["message"][:14]) == ("INFO", "stepfs-produce", "plan into file")
    assert line["timestamp"].endswith("Z")
    refused = run(plan, file_url, "--producer-id", "p" * 300, "--log-format", "json")
    (line,) = map(json.loads, refused.err.splitlines())
    assert (refused.returncode, line["level"]) == (2, "ERROR")
    assert run(plan, file_url, "--log-format", "xml").err == "stepfs-produce: log format 'xml': write text or json\n"


def test_skipped_records_are_told_and_listed(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "code" / "0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{broken", *lines, "[1]"]) + "\n")
    plan.write_text(
        PLAN + "defaults: {epochs: 1, on_error: {do: skip, at_most: 1%}}\nuntil: {exhausted: all, last: pad}\n"
    )
    done = run(plan, f"file://{tmp_path}/lake", "--json")
    assert done.returncode == 0, done.stderr
    summary = done.document
    assert summary["sources"]["code"]["skipped"] == 2
    told = {(one["file"], one["record"]) for one in summary["bad_records"]}
    assert told == {("0/0.jsonl", 0), ("0/0.jsonl", path.stat().st_size - 4)}
    assert all(one["reason"] for one in summary["bad_records"])
    assert done.err.count("skipped: source code, 0/0.jsonl at ") == 2


def test_a_run_writes_a_trace_of_what_it_did(plan: Path, tmp_path: Path, undisturbed) -> None:
    """Each step, each commit and each task of a worker is an event; and the steps are as without it."""
    url, out = f"file://{tmp_path}/lake", tmp_path / "run.json.gz"
    done = run(plan, url, "--limit-steps", 6, "--trace", out)
    assert done.returncode == 0, done.err
    assert committed(url) == undisturbed[:6]
    with gzip.open(out) as file:
        events = json.load(file)["traceEvents"]
    rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one.get("name") == "thread_name"}
    found: dict[str, list[str]] = {}
    for one in events:
        if one["ph"] in {"X", "i"}:
            found.setdefault(rows[one["pid"], one["tid"]].partition(" ")[0], []).append(one["name"])
    assert sorted(found["steps"]) == [f"step {step}" for step in range(6)]
    assert "step 5" in found["planner"]
    assert {"read code", "transform prose", "put_step"} <= {*found["workers"]}
    assert "Committed" in found["commits"]
    assert any(name.startswith("for ") for name in found["waits"])


@pytest.mark.parametrize("out", ["{}/none/run.json", "{}"])
def test_a_trace_that_cannot_be_written_stops_the_run_before_it_begins(plan: Path, tmp_path: Path, out: str) -> None:
    url = f"file://{tmp_path}/lake"
    done = run(plan, url, "--limit-steps", 1, "--trace", out.format(tmp_path))
    assert (done.returncode in {3, 4}, done.err.count("\n")) == (True, 1), done.err
    assert not (tmp_path / "lake").exists()
