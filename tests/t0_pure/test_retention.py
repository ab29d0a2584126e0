"""Which checkpoints stay, and that a control record says so to every reader."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError
from stepfs.format.codec import Kind, decode, encode
from stepfs.format.control import ControlRecord, decode_control, encode_control
from stepfs.format.ids import Step
from stepfs.lake.decisions import Revise, add_to_order, decide, resume_order, set_order

LAKE = "0" * 32
EMPTY = ControlRecord(b"i" * 16, 1)
steps = st.integers(0, 30).map(Step)
orders = st.lists(steps, unique=True, max_size=8).map(tuple)
records = st.builds(
    lambda order: replace(
        decide(-1, EMPTY, Revise("run", lambda _: frozenset(order))).groups["run"],
        recorded=() if sorted(order) == list(order) else order,
    ),
    orders,
)


@given(orders, steps, st.integers(1, 4))
def test_keep_never_loses_what_was_just_recorded_nor_what_is_greater(order, step, keep):
    after = add_to_order(order, step, keep)
    assert after[-1] == step
    assert {kept for kept in order if kept > step} <= set(after)
    at_or_below = [kept for kept in after if kept <= step]
    older = [kept for kept in order if kept < step]
    assert at_or_below == [*older, step][-keep:]


@given(orders, steps)
def test_resuming_drops_nothing_and_ranks_what_is_greater_as_oldest(order, step):
    after = resume_order(order, step)
    assert set(after) == {*order, step}
    greater = [kept for kept in order if kept > step]
    assert after[: len(greater)] == tuple(greater)
    assert after[-1] == step
    assert resume_order(after, step) == after


@given(orders, st.frozensets(steps, max_size=8))
def test_a_set_keeps_the_order_of_what_was_there(order, kept):
    after = set_order(order, kept)
    assert set(after) == kept
    assert [step for step in after if step in order] == [step for step in order if step in kept]


@given(records)
def test_a_record_reads_back(record):
    groups = {"run": record}
    body = encode_control(LAKE, replace(EMPTY, groups=groups))
    assert decode_control(body, "x")[1].groups == groups
    (group,) = decode(Kind.CONTROL, body, "x").maps("groups")
    assert group.integers("kept") == sorted(record.order)
    assert ("recorded" in group) == (list(record.order) != sorted(record.order))


@pytest.mark.parametrize(
    "says", [
        {"recorded": [2, 1, 3]}, {"recorded": [2, 2]}, {"recorded": [1, 2]}, {"recorded": "2,1"},
        {"kept": [2, 1]}, {"kept": [0, 1, 2]}, {"kept": [1, 1]}, {"kept": [], "start": 0},
        {"fork": 7}, {"fork": "x" * 3000}, {"name": ""}, {"name": "a\x1b[2J"},
        {"name": 7},
    ],
)  # fmt: skip
def test_groups_that_contradict_the_record_are_corrupt(says):
    """The first live step is 1."""
    group = {"name": "run", "start": 1, "kept": [1, 2]}
    body = decode(Kind.CONTROL, encode_control(LAKE, replace(EMPTY, first_live_step=Step(1))), "x")._map
    assert decode_control(encode(Kind.CONTROL, {**body, "groups": [group]}), "x")
    with pytest.raises(CorruptError):
        decode_control(encode(Kind.CONTROL, {**body, "groups": [{**group, **says}]}), "x")


@pytest.mark.parametrize("minima", [[1], [1, 5, 1, 6], [2, 5, 3, 5], [2, 5, 1, 6], [1, 2] * 300])
def test_minima_that_do_not_rise_are_corrupt(minima):
    body = decode(Kind.CONTROL, encode_control(LAKE, EMPTY), "x")._map
    with pytest.raises(CorruptError):
        decode_control(encode(Kind.CONTROL, {**body, "minima": minima}), "x")
