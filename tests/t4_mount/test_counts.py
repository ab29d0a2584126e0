"""What reading costs, as counts: store requests, file system requests. Exact, so they guard performance in CI."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from finished import ran
from realmount import change_constants, lake_with, mounted, stepfs, until

LONG_LAKE = Path(__file__).parents[2] / "scripts" / "make_long_lake"
SELDOM_S = 0.5  # the longest interval between two looks, which is two seconds in earnest


def store_requests(mount) -> int:
    return mount.status()["store"]["requests"]


def test_an_unchanged_lake_costs_one_request_per_poll_interval_at_most(file_url, tmp_path, monkeypatch):
    change_constants(monkeypatch, {"stepfs.follow.follower:INTERVAL_S_MAX": SELDOM_S})
    lake_with(file_url, 5)
    with mounted(file_url, tmp_path / "m", "--poll", "100ms", "--no-prime") as mount:
        began, before = time.monotonic(), store_requests(mount)
        looks = 0
        while time.monotonic() - began < 2.5 or looks <= 50:
            mount.steps()
            mount.step(3).stat()
            mount.file(3, 1).stat()
            assert not mount.step(99).exists()
            looks += 1
        took, spent = time.monotonic() - began, store_requests(mount) - before
        assert spent <= took / 0.1
        assert spent <= 6 + took / SELDOM_S  # backed off: 0.1, 0.15 … 0.5 s


def test_lookups_stats_and_listings_cost_the_store_nothing(file_url, tmp_path):
    lake_with(file_url, 200)
    with mounted(file_url, tmp_path / "m", "--poll", "30s") as mount:
        before = store_requests(mount)
        subprocess.run(["ls", "-lR", *mount.steps()], check=True, cwd=mount.directory, stdout=subprocess.DEVNULL)
        subprocess.run(["find", ".", "-name", "rank*"], check=True, cwd=mount.directory, stdout=subprocess.DEVNULL)
        for step in range(200):
            mount.file(step, 0).stat()
            mount.file(step, 7).exists()
        assert store_requests(mount) == before


def test_a_file_costs_three_requests_when_primed_and_its_bytes_are_fetched_once(file_url, tmp_path):
    lake_with(file_url, 10, size=100_000)
    with mounted(file_url, tmp_path / "m", "--poll", "30s", "--no-prime") as mount:
        before = mount.requests()
        for step in range(10):
            descriptor = os.open(mount.file(step, 0), os.O_RDONLY)
            while os.read(descriptor, 1 << 20):
                pass
            os.close(descriptor)
        for _ in range(3):
            mount.file(4, 0).read_bytes()
        after = mount.requests()
        spent = {name: after[name] - before.get(name, 0) for name in after}
        ours = {
            "open": 13,
            "release": 13,
            "read": 10,
        }  # keep_cache: the second read of a file is the kernel's
        status_reads = {"open": 1, "release": 0, "read": 1, "lookup": 2}
        for name, count in ours.items():
            assert spent[name] <= count + status_reads[name] + 2, (name, spent)
        assert spent["lookup"] <= 20 + status_reads["lookup"]  # one per directory, one per file
        assert spent.get("getxattr", 0) == 0
        data = mount.status()["data"]
        assert data["bytes_fetched"] <= 1.02 * sum(os.stat(mount.file(s, 0)).st_size for s in range(10)) + 10 * 200_000


@pytest.fixture(scope="module")
def long_lake(tmp_path_factory):
    url = (tmp_path_factory.mktemp("long") / "lake").as_uri()
    command = [sys.executable, str(LONG_LAKE), url, "--steps", "10000", "--slices", "2"]
    subprocess.run(command, check=True, timeout=100, stdout=subprocess.DEVNULL)
    return url


def test_listing_ten_thousand_steps_causes_no_storm(long_lake, tmp_path):
    with mounted(long_lake, tmp_path / "m", "--poll", "30s", "--no-prime") as mount:
        before, store_before = mount.requests(), store_requests(mount)
        out = ran(["ls", "-l"], check=True, cwd=mount.directory).stdout
        assert out.count("step-") == 10_000
        after = mount.requests()
        spent = {name: after[name] - before.get(name, 0) for name in after}
        assert spent.get("getxattr", 0) + spent.get("listxattr", 0) <= 2
        assert spent.get("lookup", 0) <= 5
        assert spent.get("getattr", 0) <= 5
        assert spent["readdir"] <= 10_000 // 200 + 5
        assert store_requests(mount) - store_before <= 1
        assert mount.status()["known_directories"] >= 10_000


def test_old_steps_in_random_order_cost_two_requests_each(tmp_path):
    """One for the entry of the step, one for the slice; at most 16 KiB beside the slice itself."""
    steps, size = 1100, 4096
    lake_with((tmp_path / "lake").as_uri(), steps, slices=1, size=size)
    with mounted((tmp_path / "lake").as_uri(), tmp_path / "m", "--poll", "30s", "--no-prime") as mount:
        for step in (700, 200, 900, 450):
            before = mount.status()["store"]
            assert mount.file(step, 0).stat().st_size > 0
            mount.file(step, 0).read_bytes()
            after = mount.status()["store"]
            assert after["requests"] - before["requests"] == 2
            assert after["bytes_read"] - before["bytes_read"] <= size + 4096 + (16 << 10)
        data = mount.status()["data"]
        assert data["bytes_fetched"] == data["bytes_delivered"]


def test_old_steps_cost_one_index_segment_once(long_lake, tmp_path):
    with mounted(long_lake, tmp_path / "m", "--poll", "30s", "--no-prime", "--prefetch", "0") as mount:
        before = store_requests(mount)
        assert mount.step(1000).is_dir()
        assert store_requests(mount) == before  # directories carry the segment's time
        for step in range(600, 1000):
            assert mount.file(step, 0, ".safetensors").stat().st_size > 0
        assert store_requests(mount) - before <= 2


def test_names_withdrawn_are_only_those_the_kernel_knew(file_url, tmp_path):
    lake_with(file_url, 50)
    with mounted(file_url, tmp_path / "m", "--group", "g") as mount:
        for step in (3, 4):
            mount.step(step).stat()
        assert stepfs("checkpoint", file_url, "--group", "g", "--new-group", "40").returncode == 0
        until(lambda: mount.status()["first_step"] == 40, "the view does not follow")
        metrics = (mount.directory / ".stepfs/metrics").read_text()
        assert "stepfs_invalidated_steps_total 2.0" in metrics
        until(lambda: mount.status()["known_directories"] == 0, "the kernel keeps what it was told to drop")
