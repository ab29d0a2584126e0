"""What reading costs, as counts: store requests, file system requests. Exact, so they guard performance in CI."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from finished import ran
from realmount import change_constants, lake_with, make_lake, mounted, stepfs, until

from stepfs.data.page_cache import resident_bytes, resident_bytes_of
from stepfs.format.ids import BLOCK_BYTES
from stepfs_producer import Producer

LONG_LAKE = Path(__file__).parents[2] / "scripts" / "make_long_lake"
SELDOM_S = 0.5  # the longest interval between two looks, which is two seconds in earnest


def store_requests(mount) -> int:
    return mount.status()["store"]["requests"]


def test_an_unchanged_lake_costs_one_request_per_poll_interval_at_most(file_url, tmp_path, monkeypatch):
    change_constants(monkeypatch, {"stepfs.follow.polling:INTERVAL_S_MAX": SELDOM_S})
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


STEPS = 4
ATTEMPTS = 5


def commit(url, slices, sizes, steps=STEPS):
    """Steps of random bytes; returns them."""
    make_lake(url, slices=slices)
    draw = random.Random(slices)
    batches = [[draw.randbytes(draw.choice(sizes)) for _ in range(slices)] for _ in range(steps)]
    with Producer(url, producer_id="p") as producer:
        for number, batch in enumerate(batches):
            producer.append(batch, position=number)
    return batches


def read(path):
    """As cheaply as a program can: Python's own open() asks more than it must."""
    return read_and_close(os.open(path, os.O_RDONLY))


def read_and_close(descriptor):
    pieces = []
    while piece := os.read(descriptor, 1 << 20):
        pieces.append(piece)
    os.close(descriptor)
    return b"".join(pieces)


def primed(mount, files):
    """Until so many files were primed. Not until they are resident: a kernel that pages out what nobody touches may
    have taken pages back before anybody looks."""
    until(lambda: mount.status()["data"]["primed_files"] >= files, lambda: f"not primed: {mount.status()}")


def settled(mount):
    """File system requests, once nothing but our own looks adds to them; and what such a look adds."""
    looks = [mount.requests() for _ in range(2)]

    def quiet():
        looks.append(mount.requests())
        first, second, third = looks[-3:]
        return all(third[name] - second[name] == second[name] - first.get(name, 0) for name in third)

    until(quiet, "the mount never rests")
    return looks[-1], {name: looks[-1][name] - looks[-2][name] for name in looks[-1]}


def resident_and_settled(mount, path, size):
    """A primed file that is resident when the counting begins; a pass over it brings back what the kernel took."""
    for _ in range(20):
        if resident_bytes(path, size) == size:
            before, own = settled(mount)
            if resident_bytes(path, size) == size:
                return before, own
        read(path)
    raise AssertionError(f"the kernel takes pages of {path} back again and again")


def spent(mount, before, own):
    now = mount.requests()
    return {name: now[name] - before.get(name, 0) - own.get(name, 0) for name in now}


@pytest.mark.parametrize("size", [BLOCK_BYTES + 12_345, 100_001], ids=["several blocks", "a small file"])
def test_a_primed_file_is_read_without_asking_the_daemon(lake_url, tmp_path, size):
    batches = commit(lake_url, 1, [size])
    with mounted(lake_url, tmp_path / "m", "--ranks", "0", "--prefetch", f"{STEPS}") as mount:
        primed(mount, STEPS)
        assert any(resident_bytes(mount.file(step, 0), size) == size for step in range(STEPS)), "nothing read them yet"
        for step in range(STEPS):
            asked = [{"read": 1}]
            while asked[-1].get("read", 0) and len(asked) < ATTEMPTS:  # beside others the daemon looks at itself
                before, own = resident_and_settled(mount, mount.file(step, 0), size)
                assert read(mount.file(step, 0)) == batches[step][0]
                asked.append(spent(mount, before, own))
            assert asked[-1].get("read", 0) == 0, asked


def test_an_unprimed_file_is_read_by_asking_so_that_the_test_above_can_fail(file_url, tmp_path):
    commit(file_url, 1, [100_001])
    with mounted(file_url, tmp_path / "m", "--no-prime", "--prefetch", "0") as mount:
        before, own = settled(mount)
        read(mount.file(1, 0))
        assert spent(mount, before, own)["read"] >= 1


def test_a_primed_small_file_costs_three_requests_at_most(file_url, tmp_path):
    slices, size = 64, 16 << 10
    batches = commit(file_url, slices, [size])
    with mounted(file_url, tmp_path / "m", "--ranks", f"0-{slices - 1}", "--prefetch", f"{STEPS}") as mount:
        files = slices * STEPS
        primed(mount, files)
        before, own = settled(mount)
        taken = 0  # files of which the kernel took pages back before they are read
        for step, batch in enumerate(batches):
            for rank in range(slices):
                descriptor = os.open(mount.file(step, rank), os.O_RDONLY)
                taken += resident_bytes_of(descriptor, size) != size
                assert read_and_close(descriptor) == batch[rank]
        asked = spent(mount, before, own)
        asked.pop("forget", None)
        assert sum(asked.values()) <= 3 * files, asked
        assert asked.get("read", 0) <= 2 * taken, (
            asked
        )  # a file of four pages is two READs at most; none if it is there
        assert taken <= files / 2, "else this shows nothing"


@pytest.mark.parametrize(("slices", "ranks"), [(8, 3), (64, 1), (64, 64)], ids=str)
def test_a_node_fetches_the_bytes_of_its_ranks_in_one_request_per_step(file_url, tmp_path, slices, ranks):
    batches = commit(file_url, slices, [4 << 10, 5000, 12_345, 70_000])
    first = ranks if 2 * ranks <= slices else 0  # slices of other nodes lie on both sides
    mine = range(first, first + ranks)
    needed = sum(len(batch[rank]) for batch in batches for rank in mine)
    with mounted(file_url, tmp_path / "m", "--ranks", f"{mine[0]}-{mine[-1]}", "--prefetch", f"{STEPS}") as mount:
        until(lambda: mount.status()["data"]["bytes_fetched"] >= needed, "not fetched ahead")
        for step, batch in enumerate(batches):
            for rank in mine:
                assert read(mount.file(step, rank)) == batch[rank]
        data = mount.status()["data"]
        assert data["bytes_fetched"] <= 1.02 * needed, data
        assert data["requests"] == STEPS, data  # each step's share is less than a block


def test_a_mount_of_some_steps_fetches_no_others(file_url, tmp_path):
    batches = commit(file_url, 2, [5000], steps=8)
    with mounted(file_url, tmp_path / "m", "--steps", "2:4", "--ranks", "1", "--prefetch", "8") as mount:
        until(lambda: mount.status()["data"]["primed_files"] == 2, "not primed")  # what is opened before is not
        for step in (2, 3):
            assert read(mount.file(step, 1)) == batches[step][1]
        assert mount.status()["data"]["requests"] == 2


def test_a_large_file_is_fetched_in_blocks_each_once(file_url, tmp_path):
    size = 2 * BLOCK_BYTES + 5
    batches = commit(file_url, 2, [size], steps=2)
    with mounted(file_url, tmp_path / "m", "--prefetch", "0") as mount:
        for step, batch in enumerate(batches):
            assert read(mount.file(step, 1)) == batch[1]
            assert read(mount.file(step, 1)) == batch[1]
        data = mount.status()["data"]
        assert data["requests"] == 2 * 3, data
        assert data["bytes_fetched"] == 2 * size, data


MAPPED = 160
SIZE = 512 << 10
IN_ORDER = 8  # steps after which a reader that began in the middle of a lake is believed to go on in order


def map_file(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def are_primed(mount, files):
    return mount.status()["data"]["primed_files"] >= files


def test_files_mapped_beyond_the_budget_leave_room_for_steps_and_have_their_bytes_when_touched(file_url, tmp_path):
    batches = commit(file_url, 1, [SIZE], steps=MAPPED + 20)
    with mounted(file_url, tmp_path / "m", "--group", "g", "--memory", "64M", "--poll", "30s") as mount:
        maps = [map_file(mount.file(step, 0)) for step in range(MAPPED)]
        assert mount.status()["data"]["bytes_fetched"] == 0
        for step in range(MAPPED, MAPPED + 20):
            if step == MAPPED + IN_ORDER + 1:  # what is opened before it is primed stays so
                until(partial(are_primed, mount, MAPPED + 20 - step), "the steps ahead are not primed")
            assert read(mount.file(step, 0)) == batches[step][0]
        assert mount.status()["data"]["bytes_fetched"] <= 20 * SIZE
        stepfs("checkpoint", file_url, "--group", "g", "--new-group", str(MAPPED))
        until(lambda: mount.steps()[0] == f"step-{MAPPED:09d}", "the checkpoint is not seen")
        held = 16
        for opened in maps[held:]:
            opened.close()
        for step, opened in enumerate(maps[:held]):
            assert opened[:] == batches[step][0]
            opened.close()
