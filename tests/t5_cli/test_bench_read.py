"""The reading benchmarks run: every row at its smallest, in seconds. Their figures mean nothing here."""

from __future__ import annotations

import json
import subprocess

import pytest
import tools


def bench(program, *arguments, out):
    command = tools.command(program, "--quick", *arguments, "--out", str(out))
    with subprocess.Popen(
        command, env=tools.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            printed, said = running.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            running.terminate()  # it takes its mounts and servers along
            raise
    assert running.returncode == 0, said
    (found,) = out.glob("*.json")
    return json.loads(found.read_text()), printed


@pytest.mark.slow
def test_bench_read_prints_and_keeps_its_rows(tmp_path):
    document, printed = bench("bench_read", "--only", "counts", out=tmp_path)
    rows = {row["what"]: row for row in document["rows"]}
    assert set(document["figures"]) == {"counts", "load before counts"}
    # Counts are exact on any machine.
    assert rows["bytes fetched / delivered"]["held"], rows
    assert rows["requests / ⌈bytes / 8 MiB⌉"]["held"], rows
    assert "bytes fetched / delivered" in printed


@pytest.mark.slow
def test_bench_train_says_the_share_of_time_that_a_trainer_waits(tmp_path):
    document, printed = bench("bench_train", out=tmp_path)
    assert [len(found["waits"]) for found in document["figures"].values()] == [24]
    assert "stall of a sleeping trainer at 95% of 100 MB/s" in printed
    assert document["machine"]["load_after"] >= 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_row_can_be_measured(tmp_path):
    done = tools.ran("bench_read", "--quick", "--long", "--soak", "0.2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {row["held"] for row in json.loads((tmp_path / "bench_read.json").read_text())["rows"]}
