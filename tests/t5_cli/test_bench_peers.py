"""`bench_train --peers` from end to end at its smallest: ours alone, killed and resumed, into table and JSON."""

from __future__ import annotations

import json

import pytest
import tools


@pytest.mark.parametrize(
    ("peer", "kind", "sample_bytes", "bound", "pss_mib"),
    [
        ("stepfs-loop", "text", 16 << 10, 1.1, 20),
        ("stepfs", "text", 16 << 10, 1.1, 100),
        ("stepfs", "images", 15 << 10, 2.0, 100),
    ],
)
@pytest.mark.slow  # torch, imported four times
def test_a_quick_run_of_ours_resumes_exactly_and_fetches_what_it_delivers(
    tmp_path, peer, kind, sample_bytes, bound, pss_mib
):
    done = tools.ran(
        "bench_train", "--peers", "--quick", "--only", peer, "--kinds", kind, "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "bench_train_peers.json").read_text(encoding="utf-8"))
    (result,) = document["figures"]["peers"]
    assert result["trouble"] == ""
    assert (result["resume"], result["other_workers"]) == ("exact", "exact")
    assert sample_bytes <= result["bytes_per_sample"] < bound * sample_bytes
    assert result["samples_per_s"] > 0
    assert 0 <= result["stall"] <= 1
    assert result["cpu_s_per_1000"] > 0
    assert result["pss_mib"] > pss_mib
    assert "stepfs" in result["versions"]
    assert "torch" in result["versions"]
    page = (tmp_path / "bench_train_peers.md").read_text(encoding="utf-8")
    assert f"| {peer} |" in page
    assert {row["what"].partition(": ")[0] for row in document["rows"]} == {f"{kind}, {peer}"}


def test_a_peer_that_nobody_knows_is_a_mistake_of_usage():
    done = tools.ran("bench_train", "--peers", "--only", "stepfs,tensorflow")
    assert done.returncode == 2
    assert "tensorflow" in done.stderr
    assert "mosaicml" in done.stderr
