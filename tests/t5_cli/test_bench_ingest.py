"""The benchmark runs: its smallest setting ends with a table and JSON of the shape that others read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import tools

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


@pytest.mark.slow
@pytest.mark.timeout(300)  # it takes 15 s on a machine of its own
def test_the_smallest_run_writes_table_and_json(tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    directories = ["--out", str(out), "--scratch", str(scratch)]
    done = tools.ran("bench_ingest", *SMALLEST, "--only", "growth,pace", "--long-steps", "1000", *directories)
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
    assert all(
        slot["steps_per_s"] > 0 and slot["p99_s"] > 0 and 0 <= slot["lost_share"] < 1 for slot in slots
    )
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("sign", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
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


@pytest.mark.slow
def test_beside_brokers_a_lake_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = tools.ran("bench_ingest", "--peers", "--quick", "--only", "stepfs", "--out", out)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out/bench_ingest_peers.json").read_text(encoding="utf-8"))
    sides = document["figures"]["peers"]
    assert [side["settings"] for side in sides] == ["default", "fsync"]
    for side in sides:
        assert side["lost"].startswith("0 of 1")
        assert set(side["mb_per_s"]) == {"1", "8"}
        assert 0 < side["p50_s"] <= side["p99_s"]
    assert "stepfs on SeaweedFS" in done.stdout


def test_a_side_that_nobody_knows_is_a_mistake_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    from bench_ingest.__main__ import parse  # noqa: PLC0415 - half a second

    with pytest.raises(SystemExit):
        parse(["--peers", "--only", "stepfs,rabbit"])
    assert "rabbit" in capsys.readouterr().err
    assert parse(["--peers"]).only == ["stepfs", "nats", "nats-debian"]
    assert "growth" in parse([]).only
