"""What bench_train judges by: the bandwidth that all connections share, and the waits of a sleeping trainer."""

from __future__ import annotations

import pytest

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
