"""The benchmark of the planner runs: a quick part ends with a table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tools


@pytest.mark.slow
@pytest.mark.timeout(300)  # it takes 10 s on a machine of its own
def test_a_quick_run_writes_table_and_json(tmp_path: Path) -> None:
    done = tools.ran("bench_plan", "--quick", "--only", "time", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "bench_plan.json").read_text(encoding="utf-8"))
    assert document["benchmark"] == "bench_plan"
    rows = [row["what"] for row in document["rows"]]
    assert len(rows) == 5
    assert all(row in done.stdout for row in rows)


def test_an_unknown_part_is_named_with_the_known_ones() -> None:
    done = tools.ran("bench_plan", "--only", "balanse")
    assert done.returncode == 2
    assert "--only balanse: choose from balance, time, mix" in done.stderr
