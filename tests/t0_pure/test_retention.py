"""Which checkpoints stay, and that a record says so to older and newer readers alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import numbers

from stepfs.errors import CorruptError
from stepfs.format.codec import Kind, decode, encode
from stepfs.format.ids import Step
from stepfs.format.records import ConsumerRecord, decode_consumer, encode_consumer
from stepfs.lake import retention

LAKE = "0" * 32
EMPTY = ConsumerRecord(b"i" * 16, "run", (), Step(0), retired=False, time_ms=1)
steps = st.integers(0, 30).map(Step)
orders = st.lists(steps, unique=True, max_size=8).map(tuple)
records = st.builds(
    lambda order, opened: replace(retention.with_order(EMPTY, order), opened=Step(opened)), orders, numbers
)


@given(orders, steps, st.integers(1, 4))
def test_keep_never_loses_what_was_just_recorded_nor_what_is_greater(order, step, keep):
    after = retention.add(order, step, keep)
    assert after[-1] == step
    assert {kept for kept in order if kept > step} <= set(after)
    at_or_below = [kept for kept in after if kept <= step]
    older = [kept for kept in order if kept < step]
    assert at_or_below == [*older, step][-keep:]


@given(orders, steps)
def test_resuming_drops_nothing_and_ranks_what_is_greater_as_oldest(order, step):
    after = retention.resume(order, step)
    assert set(after) == {*order, step}
    greater = [kept for kept in order if kept > step]
    assert after[: len(greater)] == tuple(greater)
    assert after[-1] == step
    assert retention.resume(after, step) == after


@given(orders, st.frozensets(steps, max_size=8))
def test_a_set_keeps_the_order_of_what_was_there(order, kept):
    after = retention.set_to(order, kept)
    assert set(after) == kept
    assert [step for step in after if step in order] == [step for step in order if step in kept]


@given(records, steps)
def test_what_was_reclaimed_is_left_out_and_nothing_else(record, first_live):
    rest = retention.surviving(record, first_live)
    assert rest.need >= first_live
    assert rest.order == tuple(step for step in record.order if step >= first_live)
    assert (rest is record) == (record.need >= first_live)


@given(records)
def test_a_record_reads_back_and_an_older_reader_finds_what_it_knows(record):
    body = encode_consumer(LAKE, record)
    assert decode_consumer(body, "x") == (LAKE, record)
    assert decode(Kind.CONSUMER, body, "x").integers("kept") == sorted(record.order)


def test_a_record_of_an_older_writer_has_neither_key_and_so_has_one_that_says_nothing_new():
    record = retention.with_order(EMPTY, (Step(1), Step(2)))
    fields = decode(Kind.CONSUMER, encode_consumer(LAKE, record), "x")
    assert "recorded" not in fields
    assert "opened" not in fields


@pytest.mark.parametrize(
    "says",
    [{"recorded": [2, 1, 3]}, {"recorded": [2, 2]}, {"recorded": "2,1"}, {"opened": -1}, {"opened": None}],
)
def test_keys_that_contradict_the_record_are_corrupt(says):
    fields = decode(
        Kind.CONSUMER, encode_consumer(LAKE, retention.with_order(EMPTY, (Step(1), Step(2)))), "x"
    )
    with pytest.raises(CorruptError):
        decode_consumer(encode(Kind.CONSUMER, {**fields._map, **says}), "x")
