"""What benchmarks judge by: the bandwidth that all connections share, the waits of a sleeping trainer; and their tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench import report
from bench.report import Row, at_least, at_most
from bench.slow_store import TokenBucket
from bench_train.accelerator import judge


def test_connections_share_one_bandwidth_in_the_order_they_ask():
    bucket = TokenBucket(100.0, burst_s=0.0)
    assert [bucket.reserve(50, now=10.0) for _ in range(3)] == [10.5, 11.0, 11.5]
    assert bucket.reserve(10, now=11.0) == pytest.approx(11.6)
    assert bucket.reserve(10, now=20.0) == pytest.approx(20.1)  # what was idle is not made up for


def test_a_wait_counts_beyond_its_copy_and_the_beginning_apart():
    waits = [1.1, 0.6, 0.1, 0.1, 0.3, 0.1]
    found = judge(waits, [0.1] * 6, period_s=0.5, beginning=2)
    assert found.beginning_s == pytest.approx(1.5)
    assert found.stall == pytest.approx(0.2 / (0.2 + 4 * 0.5))
    assert found.longest_s == pytest.approx(0.2)
    assert found.copy_share == pytest.approx(0.2)


LONG = "tokenise + pack + commit of many sources, with two workers, first to last commit, beside the others"
ROWS = [
    at_least(0.85, LONG, "1234.56 M tokens/s", "Pool(2) without a lake 12.34; CPU 1.23 ×, ranged GETs 550/s", 1234.567),
    at_most(1000.5, "stall", "0.29 %", "", 0.5, "ms"),
    Row("requests per commit, 100,000 steps of history", "3.00", LONG, 1.0, "equal, ≤ 3", held=True),
    Row("limit: SeaweedFS, bare HTTP × 4", "656 MB/s"),
]


@pytest.mark.parametrize("width", [80, 100, 150])
def test_ratio_target_and_verdict_are_never_cut_and_nothing_is_lost(width):
    out = io.StringIO()
    Console(file=out, width=width).print(report.table("A title", ROWS))
    assert "…" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= width
    cells = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if "│" in line]
    shown = [tuple(cell.strip() for cell in line[3:]) for line in cells]
    assert [one for one in shown if any(one)] == [
        ("1234.57", "≥ 0.85 ×", "reached"),
        ("0.50", "≤ 1000.5 ms", "reached"),
        ("1.00", "equal, ≤ 3", "reached"),
    ]
    for column, field in enumerate(("what", "ours", "against")):
        assert "".join("".join(line[column].split()) for line in cells) == "".join(
            "".join(getattr(row, field).split()) for row in ROWS
        )


def test_a_pipe_gets_each_row_in_a_line(tmp_path, capsys):
    made = report.Report("bench", "A title")
    made.rows = ROWS
    made.finish(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    for row in ROWS:
        assert any(row.what in line and row.ours in line and row.against in line for line in printed)
