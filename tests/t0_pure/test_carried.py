"""Commits that carry those before them: what is carried, what is read, and what is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.format.codec import Kind, decode, encode
from stepfs.format.commit import CARRIED_MAX, Commit, CommitKind, chain_digest, decode_commit, encode_commit
from stepfs.format.ids import Epoch, Step, Version
from stepfs.lake.log.carriers import CARRIED_BYTES_MAX, LEVELS, Newest, first_carried, reading_plan, unfolded

LAKE = "a" * 32


def commit_of(version: int, digest: bytes, position: bytes = b"") -> Commit:
    return Commit(
        Version(version), LAKE, CommitKind.EPOCH, bytes(16), digest, "p", Epoch(1), bytes(16), 0, position, Step(0), (),
        1, 0, 0,
    )  # fmt: skip


def log_of(versions: int, *, knows: int = 1 << 20, position: int = 0) -> list[bytes]:
    """Stored commits whose writers carry what they know: the newest so many."""
    digest, stored, newest = bytes(32), list[bytes](), Newest()
    for version in range(versions):
        if version % knows == 0:
            newest.clear()
        commit = newest.carried_by(commit_of(version, digest, bytes(position)))
        body = encode_commit(commit)
        newest.keep(commit, body)
        stored.append(body)
        digest = chain_digest(digest, body)
    return stored


def versions_in(body: bytes, after: int = -1) -> list[int]:
    found = unfolded(decode_commit(body, "x"), body, after)
    return [commit.version for commit, _ in found]


def test_a_carrier_has_all_before_it_back_to_the_last_of_its_level() -> None:
    stored = log_of(300)
    for version, body in enumerate(stored):
        first = first_carried(version)
        assert versions_in(body) == list(range(first, version + 1))
        level = next((level for level in reversed(LEVELS) if (version + 1) % level == 0), 1)
        assert version - first == level - 1
        assert [inner for _, inner in unfolded(decode_commit(body, "x"), body, -1)] == stored[first : version + 1]
    assert len(decode_commit(stored[255], "x").carried) == 7 + 7


def test_only_what_is_wanted_is_unfolded() -> None:
    body = log_of(64)[63]
    assert versions_in(body, after=40) == list(range(41, 64))
    assert versions_in(body, after=62) == [63]


@pytest.mark.parametrize("knows", [1, 3, 8, 10, 63])
def test_a_writer_carries_the_newest_of_what_it_knows(knows: int) -> None:
    for version, body in enumerate(log_of(200, knows=knows)):
        found = versions_in(body)
        assert found == list(range(found[0], version + 1))
        assert found[0] == max(first_carried(version), version // knows * knows) or found[0] > first_carried(version)


def test_no_more_is_carried_than_a_bound() -> None:
    for body in log_of(130, position=60_000):
        assert sum(map(len, decode_commit(body, "x").carried)) <= CARRIED_BYTES_MAX
    assert versions_in(log_of(64, position=60_000)[63]) == list(range(56, 64))


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from((*LEVELS, 1)))
def test_a_plan_reads_each_version_once_and_none_that_is_not_wanted(first: int, count: int, level: int) -> None:
    wanted = list(range(first, first + count))
    plan = reading_plan(wanted, level)
    assert set(plan) <= set(wanted)
    assert plan == sorted(plan)
    if level == LEVELS[-1]:
        stored = log_of(first + count)
        has = [version for number in plan for version in versions_in(stored[number]) if version >= first]
        assert set(has) == set(wanted)
        assert len(plan) <= 1 + 7 + 7 + count // 64 + 7 + 7


@given(
    st.binary(max_size=200) | st.none() | st.lists(st.none() | st.binary(max_size=9) | st.integers(0, 9), max_size=70)
)
def test_what_is_malformed_does_not_exist(value: object) -> None:
    body = encode_commit(commit_of(7, bytes(32)))
    fields = decode(Kind.COMMIT, body, "x")._map
    found = decode_commit(encode(Kind.COMMIT, {**fields, "carried": value}), "x")  # type: ignore[dict-item]
    good = isinstance(value, list) and len(value) <= CARRIED_MAX and all(isinstance(each, bytes) for each in value)
    assert found.carried == (tuple(value) if good else ())  # type: ignore[arg-type]
    assert versions_in(encode_commit(found))[-1] == 7


def nested(depth: int) -> bytes:
    """A commit in a commit in a commit …, which only a liar writes."""
    body = encode_commit(commit_of(0, bytes(32)))
    for version in range(1, depth):
        body = encode_commit(replace(commit_of(version, bytes(32)), carried=(body,)))
    return body


def test_a_liar_cannot_nest_for_ever() -> None:
    body = nested(40)
    assert versions_in(body) == [37, 38, 39]
    newest = Newest()
    newest.keep(decode_commit(body, "x"), body)
    assert newest.carried_by(commit_of(40, bytes(32))).carried == ()


def wrong(truth: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(reversed(truth)), truth[1:], truth[:-1], (b"", *truth), (*truth, truth[0])]  # type: ignore[list-item]


def test_a_writer_that_read_a_lie_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = log_of(16)
    truth = decode_commit(stored[7], "x")
    for carried in wrong(truth.carried):
        newest, commit = Newest(), replace(truth, carried=carried)
        newest.keep(commit, encode_commit(commit))
        for version in range(8, 15):
            newest.keep(decode_commit(stored[version], "x"), stored[version])
        assert len(newest.carried_by(commit_of(15, bytes(32))).carried) == 7
