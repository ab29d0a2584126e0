"""Where a plan stands: its position, what it may continue, how many bad records it bears, where it ends."""

from __future__ import annotations

from fractions import Fraction

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import Corpus, next_step, rules, small_plan, steps

from stepfs.errors import RefusedError
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import SourceRule
from stepfs_producer.plan.samples import BAD, Ahead, Long, Piece, SkipBudget, samples_after
from stepfs_producer.plan.step import End, Need, SourceState, State, position_bytes_max, read_position

integers = st.integers(-(2**63), 2**63 - 1)
states = st.dictionaries(
    st.text(max_size=8), st.builds(SourceState, st.text(max_size=8), st.text(max_size=8), *[integers] * 10)
)


@given(states, st.integers(0, 2**63 - 1))
def test_a_position_is_read_back_and_never_outgrows_its_bound(sources, step: int) -> None:
    state = State("digest", step, sources)
    stored = msgpack.packb(state.position())
    assert read_position(msgpack.unpackb(stored)) == state
    assert len(stored) <= position_bytes_max(state)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"pipeline": "text"}, "used by another pipeline"),
        ({"v": 2}, "of version 2, this program reads 1; upgrade stepfs"),
        ({"sources": {"code": ["a", "b", 1]}}, "malformed"),
        ({"sources": 3}, "malformed"),
        ({"step": None}, "malformed"),
    ],
)
def test_what_is_no_position_of_a_plan_is_refused(change: dict[str, object], advice: str) -> None:
    position = State("digest", 3, {"code": SourceState("a", "b")}).position()
    assert read_position(position).step == 3
    with pytest.raises(RefusedError, match=advice):
        read_position({**position, **change})


def test_another_identity_is_refused_by_name() -> None:
    chosen, _ = small_plan()
    state = Planner(chosen).begin()
    other = {**state.sources, "prose": SourceState("prose-2", "")}
    with pytest.raises(RefusedError, match="source prose is not the one that this lake"):
        Planner(chosen).begin(State("digest", 5, other))


def test_a_source_that_leaves_keeps_its_place_and_hands_on_its_debt() -> None:
    chosen, corpora = small_plan()
    before = steps(chosen, corpora, 3)[-1].after
    fewer = rules({"code": 1, "prose": 1}, lengths={0: 64}, ranks=4, micro_batch_tokens=256)
    planner = Planner(fewer)
    plan = next_step(planner, planner.begin(before), {name: corpora[name] for name in fewer.sources})
    left = plan.after.sources["chats"]
    assert left.debt == 0
    assert (left.tokens, left.taken, left.block) == (
        before.sources["chats"].tokens,
        before.sources["chats"].taken,
        before.sources["chats"].block,
    )
    assert sum(source.debt for source in plan.after.sources.values()) == 0
    assert plan.after.tokens == before.tokens + plan.tokens


def samples(tokens: list[int], *, state: SourceState | None = None, **how):
    piece = Piece(0, 0, 0, 100, 0, np.array(tokens, np.int64), (0, 0, 1))
    how = {"sequence_length": 64, "long": Long.SPLIT, "skips": None, **how}
    return samples_after("s", state or SourceState("", ""), Ahead((piece,)), **how)


def test_a_budget_of_bad_records_counts_shares_runs_and_what_was_skipped_before() -> None:
    lenient = SkipBudget(Fraction(1, 10), 2)
    assert samples([5, BAD, 5]).refused_from == 1
    assert samples([5, BAD, BAD, 5], skips=lenient).refused_from is None
    assert samples([5, BAD, BAD, BAD, 5], skips=lenient).refused_from == 1
    assert samples([BAD, 5] * 11, skips=lenient).refused_from == 10  # ten are always allowed
    earlier = SourceState("", "", records=1000, skipped=99)
    assert samples([BAD, 5, BAD, 5], state=earlier, skips=lenient).refused_from == 1
    with pytest.raises(RefusedError, match="source s: too many records"):
        samples([5, BAD, 5]).refuse_if_spent(1)


def test_bad_records_are_crossed_and_counted_and_the_first_too_many_stops_the_plan() -> None:
    corpora = {"s": Corpus("s", longest=40, bad=True)}
    source = {"s": SourceRule("s", skips=SkipBudget(Fraction(1, 2), 5))}
    chosen = rules({"s": 1}, lengths={0: 64}, ranks=2, micro_batch_tokens=256, sources=source)
    end = steps(chosen, corpora, 6)[-1].after.sources["s"]
    assert 0 < end.skipped < end.records
    strict = rules({"s": 1}, lengths={0: 64}, ranks=2, micro_batch_tokens=256)
    with pytest.raises(RefusedError, match="source s: too many records could not be decoded"):
        steps(strict, corpora, 6)


def test_a_document_begun_under_split_is_finished_under_it() -> None:
    begun = SourceState("", "", into=64)
    found = samples([200, 200], state=begun, long=Long.TRUNCATE)
    assert found.tokens.tolist() == [64, 64, 8, 64]
    assert found.first.tolist() == [64, 128, 192, 0]
    assert found.lost.tolist() == [0, 136]


def test_metadata_that_does_not_begin_at_the_cursor_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected metadata from \(0, 0, 1, 0\) on"):
        samples([1, 2], state=SourceState("", "", block=1))


def test_nothing_known_is_a_need_and_limits_are_ends() -> None:
    chosen, corpora = small_plan()
    planner = Planner(chosen)
    assert planner.next(planner.begin(), {}) == Need({"chats": 1, "code": 1, "prose": 1})
    for limit in ({"steps_max": 2}, {"tokens_max": 300}):
        short = rules({"code": 1}, lengths={0: 64}, ranks=4, micro_batch_tokens=64, **limit)
        plans = steps(short, {"code": corpora["code"]}, 9)
        assert len(plans) == 2
        assert isinstance(Planner(short).next(plans[-1].after, {}), End)
