"""What reading costs, as counts on a real mount: primed bytes ask nobody, mapped files cost nothing, and nothing is
fetched twice.
"""

from __future__ import annotations

import mmap
import os
import random
from functools import partial

import pytest
from realmount import make_lake, mounted, stepfs, until

from stepfs.data.residency import resident_bytes, resident_bytes_of
from stepfs.format.ids import BLOCK_BYTES
from stepfs_producer import Producer

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
        for step in (2, 3):
            assert read(mount.file(step, 1)) == batches[step][1]
        until(lambda: mount.status()["data"]["primed_files"] == 2, "not primed")
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
    with mounted(file_url, tmp_path / "m", "--group", "g", "--memory-size", "64M", "--poll", "30s") as mount:
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
