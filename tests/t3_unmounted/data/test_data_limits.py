"""What a process may use, read from a made-up /proc and /sys; and giving memory back while it is short."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio
import trio.testing
from data_doubles import world_of

from stepfs._internal.limits import (
    MEMORY_BYTES_MIN,
    Memory,
    default_memory_bytes,
    local_ranks,
    read_memory,
    usable_cpus,
)
from stepfs.data.memory_pressure import MemoryGovernor, is_tight
from stepfs.data.slices import Slices
from stepfs.errors import UsageError
from stepfs.format.ids import SliceIndex
from stepfs.reader.options import LakeOptions
from stepfs_producer.run.memory import memory_of

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """64 GiB, 48 of them available."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    write("proc/pressure/memory", "some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=0.10 avg60=0\n")
    return tmp_path, write


def test_a_bare_machine(machine):
    root, _ = machine
    assert read_memory(root) == Memory(64 * GIB, 48 * GIB, 1.5)
    assert default_memory_bytes(read_memory(root)) == 9 * GIB


@pytest.mark.parametrize(
    ("available", "expected"), [(0, 1 / 16), (4, 1), (32, 8), (48, 9), (256, 22), (1024, 64), (4096, 64)]
)
def test_the_default_budget_grows_with_memory(available, expected):
    assert default_memory_bytes(Memory(4096 * GIB, available * GIB, 0.0)) == expected * GIB


def test_the_tightest_ancestor_counts(machine):
    root, write = machine
    write("proc/self/cgroup", "0::/pod/trainer\n")
    write("sys/fs/cgroup/pod/memory.max", f"{8 * GIB}\n")
    write("sys/fs/cgroup/pod/memory.current", f"{6 * GIB}\n")
    write("sys/fs/cgroup/pod/memory.stat", f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}\nfile_dirty {GIB}\n")
    write("sys/fs/cgroup/pod/trainer/memory.max", "max\n")
    write("sys/fs/cgroup/pod/trainer/memory.high", f"{20 * GIB}\n")
    write("sys/fs/cgroup/pod/trainer/memory.pressure", "some avg10=33.00 avg60=0\n")
    found = read_memory(root)
    assert found == Memory(8 * GIB, 4 * GIB, 33.0)
    assert default_memory_bytes(found) == GIB


def test_inside_a_cgroup_namespace_the_limit_is_at_the_root(machine):
    root, write = machine
    write("proc/self/cgroup", "0::/\n")
    write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    write("sys/fs/cgroup/memory.current", "0\n")
    assert read_memory(root).limit == GIB


def test_cgroup_v1(machine):
    root, write = machine
    write("proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")
    write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{2 * GIB}\n")
    write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", f"{GIB}\n")
    assert read_memory(root) == Memory(2 * GIB, GIB, 1.5)


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_quota_of_a_container_is_its_cpus(machine, monkeypatch, version):
    root, write = machine
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(128))

    def give(group, quota, period):
        if version == 2:
            write(f"sys/fs/cgroup/{group}/cpu.max", f"{quota if quota > 0 else 'max'} {period}\n")
        else:
            write(f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us", f"{quota}\n")
            write(f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_period_us", f"{period}\n")

    write("proc/self/cgroup", "0::/pod/trainer\n" if version == 2 else "4:memory:/\n3:cpu,cpuacct:/pod/trainer\n")
    assert usable_cpus(root) == 128
    give("pod/trainer", -1, 100_000)
    assert usable_cpus(root) == 128
    give("pod", 400_000, 100_000)
    assert usable_cpus(root) == 4
    give("pod/trainer", 25_000, 20_000)
    assert usable_cpus(root) == 2, "1.25, rounded up"


def test_the_ranks_of_a_machine_are_as_their_launcher_says():
    assert local_ranks({}) == 1
    assert local_ranks({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}) == 8
    assert local_ranks({"SLURM_NTASKS_PER_NODE": "4"}) == 4
    assert local_ranks({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "LOCAL_WORLD_SIZE": "many"}) == 2


def test_ranks_share_the_machine_and_not_what_each_was_given(monkeypatch):
    monkeypatch.setattr("stepfs.reader.options.read_memory", lambda: Memory(64 * GIB, 16 * GIB, 0.0))
    assert LakeOptions("file:///l").memory_share == 4 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert LakeOptions("file:///l").memory_share == GIB // 2
    assert LakeOptions("file:///l", workers=4).memory_share == GIB // 8
    assert LakeOptions("file:///l", memory_bytes=GIB).memory_share == GIB


def test_a_run_plans_for_its_container(monkeypatch):
    source = SimpleNamespace(layout=SimpleNamespace(largest_block_bytes=MIB))
    rules = SimpleNamespace(step_tokens=1024, columns=())
    monkeypatch.setattr("stepfs_producer.run.memory.read_memory", lambda: Memory(600 * MIB, 300 * MIB, 0.0))
    assert memory_of(None, rules, (source,), 1).total == 150 * MIB
    monkeypatch.setattr("stepfs_producer.run.memory.read_memory", lambda: Memory(200 * MIB, 100 * MIB, 0.0))
    with pytest.raises(UsageError, match="it may use 50 MiB"):
        memory_of(None, rules, (source,), 1)


def test_nothing_readable_is_not_an_error(tmp_path):
    assert default_memory_bytes(read_memory(tmp_path)) == 8 * GIB


@pytest.mark.parametrize(
    ("memory", "tight"),
    [
        (Memory(64 * GIB, 48 * GIB, 0.0), False),
        (Memory(64 * GIB, 48 * GIB, 90.0), False),  # somebody thrashes in a cgroup of his own
        (Memory(64 * GIB, 3 * GIB, 0.0), True),
        (Memory(1024 * GIB, 5 * GIB, 0.0), False),
        (Memory(GIB, 40 * MIB, 0.0), True),
        (Memory(GIB, 150 * MIB, 0.0), False),
        (Memory(GIB, 150 * MIB, 30.0), True),
    ],
)
def test_when_memory_is_short(memory, tight):
    assert is_tight(memory) is tight


@pytest.mark.logs("memory is short")
async def test_it_shrinks_at_once_and_grows_slowly(nursery, autojump_clock):
    world = world_of(30, 8 * MIB)
    slices = Slices(world.store, memory_bytes=256 * MIB)
    now = {"memory": Memory(64 * GIB, 48 * GIB, 0.0)}
    await nursery.start(slices.run)
    await nursery.start(MemoryGovernor(slices, read=lambda: now["memory"]).run)
    slices.request([(entry, [SliceIndex(0)]) for entry in world.entries])
    await trio.sleep(5.5)
    pool = slices.cache.pool
    assert (pool.limit, pool.used) == (256 * MIB, 240 * MIB)
    now["memory"] = Memory(64 * GIB, GIB, 0.0)
    await trio.sleep(1)
    assert pool.limit == int(240 * MIB * 0.7)
    assert pool.used + pool.pooled <= pool.limit
    await trio.sleep(20)
    assert pool.limit == MEMORY_BYTES_MIN
    now["memory"] = Memory(64 * GIB, 48 * GIB, 0.0)
    await trio.sleep(25)
    assert pool.limit == MEMORY_BYTES_MIN, "not before a calm time"
    await trio.sleep(60)
    assert pool.limit == 256 * MIB
