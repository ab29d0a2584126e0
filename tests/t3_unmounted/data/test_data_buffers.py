"""Buffers of the cache: size classes, reuse, and memory that the system refuses."""

from __future__ import annotations

import errno
import mmap

import pytest

from stepfs.data.buffers import MAPPED_BYTES_MIN, Pool, size_class

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 4095, MAPPED_BYTES_MIN - 1, MAPPED_BYTES_MIN, 5 * MIB + 1, 8 * MIB])
def test_a_size_class_wastes_at_most_an_eighth(size):
    assert size <= size_class(size) <= size * 1.125


def test_large_buffers_are_reused_when_nobody_sees_them():
    pool = Pool(16 * MIB)
    first = pool.take(8 * MIB)
    memory = id(first.memory)
    pool.give(first)
    del first
    second = pool.take(7 * MIB + 1 * MIB)
    assert id(second.memory) == memory
    view = second.view(0, 10)
    pool.give(second)
    assert pool.lingering
    assert pool.used == 8 * MIB, "seen memory stays counted"
    third = pool.take(8 * MIB)
    assert id(third.memory) != memory
    assert pool.take(8 * MIB) is None
    del view
    assert pool.take(8 * MIB) is not None
    assert not pool.lingering


def test_pooled_memory_gives_way_to_other_sizes():
    pool = Pool(8 * MIB)
    pool.give(pool.take(8 * MIB))
    assert (pool.used, pool.pooled) == (0, 8 * MIB)
    assert pool.take(100) is not None
    assert pool.pooled == 0


def test_a_kernel_without_huge_pages_gives_memory_all_the_same(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert Pool(16 * MIB).take(8 * MIB) is not None


def test_memory_that_the_system_refuses_is_waited_for_and_what_is_pooled_goes_back(monkeypatch):
    pool = Pool(64 * MIB)
    pool.give(pool.take(8 * MIB))

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        assert pool.take(4 * MIB) is None
        assert (pool.used, pool.pooled, pool.refused) == (0, 0, True)
    assert pool.take(4 * MIB) is not None
    assert not pool.refused
