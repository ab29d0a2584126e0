"""What is committed next: what is pending, and what of it the log does not hold yet."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from heads import LAKE, ME, STAMP, durable, fresh, grow, started
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.commit import COMMIT_TGBS_MAX, Commit, CommitKind
from stepfs.format.ids import TOTAL_MAX, Epoch, Version
from stepfs.format.snapshot import LogState, genesis
from stepfs.format.tgb import Descriptor, SliceRef, pack_slices
from stepfs_producer.commit import rebase as room
from stepfs_producer.commit.rebase import (
    Durable,
    FencedRefusal,
    Incarnation,
    NothingLeft,
    SealedRefusal,
    rebase,
    rebase_retire,
    rebase_start,
)
from stepfs_producer.commit.uploads import UNCOMMITTED_FACTOR, UNCOMMITTED_TGBS_MAX, CommitWindow, Item


def sealed(head: LogState) -> LogState:
    return replace(head, sealed=True)


def test_a_first_start_takes_epoch_one_and_seq_zero() -> None:
    commit = rebase_start(genesis(LAKE, 1), "me", b"i" * 16, STAMP)
    assert isinstance(commit, Commit)
    assert (commit.kind, commit.epoch, commit.next_seq, commit.position) == (CommitKind.EPOCH, 1, 0, b"")


def test_pending_becomes_one_commit_that_the_log_accepts() -> None:
    head = fresh()
    commit = rebase(head, [durable(0), durable(1), durable(2)], ME, STAMP)
    after = grow(head, commit)
    assert [entry.tgb.seq for entry in after.tail] == [0, 1, 2]
    assert after.producers["me"].position == b"2"
    assert (after.total_bytes, after.total_records) == (21, 3)


def test_hazard_05_what_landed_is_dropped_and_what_was_appended_later_stays() -> None:
    head = grow(fresh(), rebase(fresh(), [durable(0), durable(1)], ME, STAMP))
    commit = rebase(head, [durable(seq) for seq in range(4)], ME, STAMP)
    assert isinstance(commit, Commit)
    assert [tgb.seq for tgb in commit.tgbs] == [2, 3]


def test_everything_landed() -> None:
    head = grow(fresh(), rebase(fresh(), [durable(0)], ME, STAMP))
    outcome = rebase(head, [durable(0)], ME, STAMP)
    assert isinstance(outcome, NothingLeft)
    assert outcome.state.next_seq == 1


def test_hazard_06_the_position_is_never_compared() -> None:
    """A rewound source commits under new seqs: the protocol does not second-guess positions."""
    head = grow(fresh(), rebase(fresh(), [durable(0), durable(1)], ME, STAMP))
    rewound = replace(durable(2), position=b"0")
    commit = rebase(head, [rewound], ME, STAMP)
    assert isinstance(commit, Commit)
    assert commit.position == b"0"


@pytest.mark.parametrize("pending", [[1], [0, 2], [0, 1, 3]])
def test_a_gap_in_seq_is_an_error(pending: list[int]) -> None:
    with pytest.raises(CorruptError, match="where the log needs"):
        rebase(fresh(), [durable(seq) for seq in pending], ME, STAMP)


def test_a_newer_incarnation_fences() -> None:
    head = started(fresh(), b"n" * 16)
    assert rebase(head, [durable(0)], ME, STAMP) == FencedRefusal(Epoch(2))
    assert rebase_retire(head, ME, STAMP) == FencedRefusal(Epoch(2))


def test_of_several_reasons_the_guard_names_the_first() -> None:
    """Fenced, all committed, sealed, a gap, no room: in this order, each with those after it."""
    head = grow(fresh(), rebase(fresh(), [durable(0)], ME, STAMP))
    full = replace(head, total_bytes=TOTAL_MAX)
    assert rebase(sealed(started(head, b"n" * 16)), [durable(0)], ME, STAMP) == FencedRefusal(Epoch(2))
    assert isinstance(rebase(sealed(full), [durable(0)], ME, STAMP), NothingLeft)
    assert rebase(sealed(full), [durable(2)], ME, STAMP) == SealedRefusal()
    with pytest.raises(CorruptError, match="where the log needs"):
        rebase(full, [durable(2)], ME, STAMP)
    with pytest.raises(RefusedError, match="the lake is full"):
        rebase(full, [durable(1)], ME, STAMP)


def test_another_incarnation_at_my_epoch_fences() -> None:
    head = started(genesis(LAKE, 1), b"n" * 16)
    assert rebase(head, [durable(0)], ME, STAMP) == FencedRefusal(Epoch(1))


def test_of_two_racing_starts_the_loser_fences_the_winner() -> None:
    head = genesis(LAKE, 1)
    won = started(head, b"a" * 16)
    both = started(won, b"b" * 16)
    assert both.producers["me"].epoch == 2
    assert isinstance(rebase(both, [durable(0)], replace(ME, incarnation=b"a" * 16), STAMP), FencedRefusal)
    assert isinstance(rebase_start(both, "me", b"b" * 16, STAMP), NothingLeft)


def test_retiring_raises_the_epoch_and_a_restart_comes_back() -> None:
    head = grow(fresh(), rebase(fresh(), [durable(0)], ME, STAMP))
    retired = grow(head, rebase_retire(head, ME, STAMP))
    assert (retired.producers["me"].epoch, retired.producers["me"].retired) == (2, True)
    assert isinstance(rebase_retire(retired, ME, STAMP), NothingLeft)
    assert isinstance(rebase(retired, [durable(1)], ME, STAMP), FencedRefusal)
    again = started(retired, b"z" * 16)
    assert (again.producers["me"].next_seq, again.producers["me"].retired) == (1, False)


def test_a_sealed_lake_takes_nothing_more_but_confirms_what_it_holds() -> None:
    head = sealed(grow(fresh(), rebase(fresh(), [durable(0)], ME, STAMP)))
    assert rebase(head, [durable(0), durable(1)], ME, STAMP) == SealedRefusal()
    assert isinstance(rebase(head, [durable(0)], ME, STAMP), NothingLeft)
    assert rebase_start(head, "other", b"o" * 16, STAMP) == SealedRefusal()
    assert rebase_retire(head, ME, STAMP) == SealedRefusal()


def test_a_log_that_went_backwards_is_not_written_to() -> None:
    with pytest.raises(CorruptError, match="lost or rewrote"):
        rebase(genesis(LAKE, 1), [durable(0)], ME, STAMP)
    with pytest.raises(CorruptError, match="lost or rewrote"):
        rebase(fresh(), [durable(0)], replace(ME, epoch=Epoch(2)), STAMP)


def test_commit_times_only_grow() -> None:
    head = replace(fresh(), time_ms=5000)
    commit = rebase(head, [durable(0)], ME, STAMP)
    assert isinstance(commit, Commit)
    assert commit.time_ms == 5001


def test_a_commit_is_bounded_in_number() -> None:
    commit = rebase(fresh(), [durable(seq) for seq in range(COMMIT_TGBS_MAX + 5)], ME, STAMP)
    assert isinstance(commit, Commit)
    assert len(commit.tgbs) == COMMIT_TGBS_MAX == commit.next_seq


def test_a_commit_is_bounded_in_bytes_but_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "COMMIT_DESCRIPTOR_BYTES_MAX", 24 * 3)
    commit = rebase(fresh(), [durable(seq) for seq in range(10)], ME, STAMP)
    assert isinstance(commit, Commit)
    assert len(commit.tgbs) == 3
    monkeypatch.setattr(room, "COMMIT_DESCRIPTOR_BYTES_MAX", 1)
    commit = rebase(fresh(), [durable(seq) for seq in range(10)], ME, STAMP)
    assert isinstance(commit, Commit)
    assert len(commit.tgbs) == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=30))
def test_any_interleaving_of_producers_and_late_landings_is_dense(script: list[tuple[int, int]]) -> None:
    """Each producer always offers all it ever made: the guard alone keeps the log exactly-once."""
    head = genesis(LAKE, 1)
    made: dict[str, list[Durable]] = {}
    for number, count in script:
        who = f"p{number}"
        me = Incarnation(who, Epoch(1), bytes([number]) * 16)
        if who not in made:
            head = started(head, me.incarnation, who)
            made[who] = []
        made[who] += [durable(len(made[who]) + extra) for extra in range(count)]
        head = grow(head, rebase(head, made[who], me, STAMP))
    for who, items in made.items():
        seqs = [entry.tgb.seq for entry in head.tail if entry.producer_id == who]
        assert seqs == list(range(len(items)))
    assert head.version == Version(len(script) + len(made) - 1)


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
