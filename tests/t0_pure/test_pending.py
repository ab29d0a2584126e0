"""The window of uncommitted appends: order and budgets."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from stepfs.format.tgb import Descriptor, SliceRef, pack_slices
from stepfs_producer.commit.uploads import UNCOMMITTED_FACTOR, UNCOMMITTED_TGBS_MAX, Item, CommitWindow


def tgb(item: Item) -> Descriptor:
    slices, blocks = pack_slices([SliceRef(64, item.payload_bytes, 1, 1, ())])
    return Descriptor(0, "key", 64 + item.payload_bytes, item.seq, slices, blocks)


def add(pending: CommitWindow, size: int) -> Item:
    return pending.add((b"x" * size,), (1,), b"")


def test_uploads_may_finish_in_any_order_commits_take_the_durable_prefix() -> None:
    pending = CommitWindow(5, memory_bytes_max=100)
    first, second, third = (add(pending, 10) for _ in range(3))
    pending.made_durable(second, tgb(second), 1.0)
    pending.made_durable(third, tgb(third), 2.0)
    assert pending.ready() == []
    pending.made_durable(first, tgb(first), 3.0)
    assert [item.tgb.seq for item in pending.ready()] == [5, 6, 7]
    assert pending.oldest_s == 3.0


def test_memory_is_given_back_when_durable_and_the_rest_when_committed() -> None:
    pending = CommitWindow(0, memory_bytes_max=100)
    item = add(pending, 80)
    assert not pending.admits(30)
    pending.made_durable(item, tgb(item), 0.0)
    assert item.payloads == ()
    assert pending.admits(100)
    assert pending.uncommitted_bytes == 80
    assert pending.committed_below(1) == 1
    assert pending.uncommitted_bytes == pending.memory_bytes == 0


def test_a_log_out_of_reach_holds_appends_back() -> None:
    pending = CommitWindow(0, memory_bytes_max=100)
    for _ in range(UNCOMMITTED_FACTOR):
        assert pending.admits(100)
        item = add(pending, 100)
        pending.made_durable(item, tgb(item), 0.0)
    assert not pending.admits(1)
    assert pending.crowded


def test_many_tiny_ones_are_bounded_by_number() -> None:
    pending = CommitWindow(0, memory_bytes_max=1 << 30)
    for number in range(UNCOMMITTED_TGBS_MAX):
        assert pending.admits(1)
        item = add(pending, 1)
        pending.made_durable(item, tgb(item), 0.0)
        assert pending.crowded == (number + 1 >= UNCOMMITTED_TGBS_MAX // 2)
    assert not pending.admits(1)


def test_a_batch_alone_is_always_admitted() -> None:
    assert CommitWindow(0, memory_bytes_max=1).admits(1000)


def test_committed_twice_is_committed_once() -> None:
    pending = CommitWindow(3, memory_bytes_max=100)
    item = add(pending, 1)
    pending.made_durable(item, tgb(item), 0.0)
    assert pending.committed_below(4) == 1
    assert pending.committed_below(4) == 0
    assert pending.committed_below(2) == 0
    assert pending.first_seq == pending.next_seq == 4


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_the_books_balance(sizes: list[int], rng: random.Random) -> None:
    pending = CommitWindow(0, memory_bytes_max=1000)
    flying: list[Item] = []
    for size in sizes:
        flying.append(add(pending, size))
        while flying and rng.random() < 0.6:
            item = flying.pop(rng.randrange(len(flying)))
            pending.made_durable(item, tgb(item), 0.0)
        ready = pending.ready()
        assert [item.tgb.seq for item in ready] == list(range(pending.first_seq, pending.first_seq + len(ready)))
        if ready and rng.random() < 0.4:
            pending.committed_below(ready[rng.randrange(len(ready))].tgb.seq + 1)
    assert pending.memory_bytes == sum(item.payload_bytes for item in flying)
    assert pending.uncommitted_bytes == sum(sizes[pending.first_seq :])
