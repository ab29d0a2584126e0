"""Records end to end in one array are a list of records, whatever is done to them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.ragged import Ragged, joined_masks
from stepfs_producer.plan.samples import Ahead, BlockHead, Heads, Piece, samples_after
from stepfs_producer.plan.sources import Long
from stepfs_producer.plan.step import SourceState

LISTS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)
NONE = np.empty(0, np.int32)


def ragged(records: list[list[int]]) -> Ragged:
    return Ragged.of([np.array(one, np.int32) for one in records], NONE)


def listed(found: Ragged) -> list[list[int]]:
    assert found.values.dtype == np.int32
    assert len(found.values) == (found.ends[-1] if len(found) else 0)
    assert [one.tolist() for one in found] == [found[record].tolist() for record in range(len(found))]
    return [one.tolist() for one in found]


@given(LISTS)
def test_it_is_the_records_it_was_made_of(records) -> None:
    found = ragged(records)
    assert listed(found) == records
    assert found.lengths.tolist() == [len(one) for one in records]
    assert found.begins.tolist() == [sum(map(len, records[:record])) for record in range(len(records))]
    assert listed(found.none_of(len(records))) == [[] for _ in records]


@given(LISTS, st.data())
def test_a_part_is_a_view_of_these_records(records, data) -> None:
    first = data.draw(st.integers(0, len(records)))
    last = data.draw(st.integers(first, len(records)))
    whole = ragged(records)
    part = whole.part(first, last)
    assert listed(part) == records[first:last]
    assert not len(part.values) or np.shares_memory(part.values, whole.values)
    again = data.draw(st.integers(0, last - first))
    assert listed(part.part(again, last - first)) == records[first + again : last]


@given(st.lists(LISTS, min_size=1, max_size=4), st.data())
def test_many_are_joined_and_gathered(many, data) -> None:
    each = [ragged(records) for records in many]
    assert listed(Ragged.join(each)) == [record for records in many for record in records]
    places = [(of, record) for of, records in enumerate(many) for record in range(len(records))]
    chosen = data.draw(st.lists(st.sampled_from(places)) if places else st.just([]))
    of, record = np.array(chosen, np.int64).reshape(-1, 2).T
    assert listed(Ragged.gather(each, of, record)) == [many[one][place] for one, place in chosen]
    order = data.draw(st.lists(st.integers(0, len(many[0]) - 1)) if many[0] else st.just([]))
    assert listed(each[0].take(np.array(order, np.int64))) == [many[0][place] for place in order]


@given(LISTS.filter(bool))
def test_its_values_lie_beside_the_pickle(records) -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(ragged(records), protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == ragged(records).nbytes
    again = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert listed(again) == listed(pickle.loads(pickle.dumps(ragged(records), protocol=4))) == records


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.booleans()), max_size=6))
def test_a_mask_is_of_all_records_or_of_none(records) -> None:
    masks = [np.array(mask, np.uint8) if given else None for mask, given in records]
    found = joined_masks(masks, [len(mask) for mask, _ in records])
    expected = [one for mask, is_given in records for one in (mask if is_given else [1] * len(mask))]
    assert (found is None) == (not any(is_given for _, is_given in records))
    assert found is None or found.tolist() == expected


@st.composite
def heads(draw: st.DrawFn) -> Heads:
    tokens = draw(st.lists(st.integers(-2, 20), max_size=5))
    ends = [sorted(draw(st.sets(st.integers(1, max(count, 1)), max_size=3))) if count > 0 else [] for count in tokens]
    return Heads(
        np.array(tokens, np.int64),
        draw(st.none() | st.just(np.array([[count % 2, count] for count in tokens], np.int64).reshape(-1, 2))),
        draw(st.none() | st.just(Ragged.of([np.array(one, np.int64) for one in ends], np.empty(0, np.int64)))),
        draw(st.none() | st.just(np.array([count > 15 for count in tokens], np.bool_))),
    )


def told(one: Heads) -> list[tuple[int, list[int], list[int], bool]]:
    """By record."""
    count = len(one.tokens)
    rows = np.zeros((count, 2), np.int64) if one.rows is None else one.rows
    ends = [[] for _ in range(count)] if one.documents is None else [own.tolist() for own in one.documents]
    plain = np.zeros(count, np.bool_) if one.plain is None else one.plain
    return list(zip(one.tokens.tolist(), rows.tolist(), ends, plain.tolist(), strict=True))


@given(st.lists(heads(), min_size=1, max_size=4), st.data())
def test_heads_are_joined_and_parted_whatever_some_of_them_lack(many, data) -> None:
    whole = Heads.join(many)
    assert told(whole) == [record for one in many for record in told(one)]
    assert (whole.documents is None) == all(one.documents is None for one in many)
    first = data.draw(st.integers(0, len(whole.tokens)))
    last = data.draw(st.integers(first, len(whole.tokens)))
    assert told(whole.part(first, last)) == told(whole)[first:last]


@given(heads(), st.sampled_from(Long), st.integers(1, 25), st.data())
def test_samples_are_the_same_from_wherever_a_step_ended(whole, long, length, data) -> None:
    """And they hold each token of a record once, but for those that are lost."""
    if not len(whole.tokens):
        return
    whole = Heads(np.abs(whole.tokens), documents=whole.documents)
    block = BlockHead(BlockAddress(0, 0, 0), len(whole.tokens), BlockAddress(0, 1, 0), crc32c=7)
    ahead = Ahead([Piece(block, 0, whole)], ended=True)
    how = {"sequence_length": length, "long": long, "skips": None}
    every = samples_after("s", SourceState("i", "l"), ahead, **how)
    kept = data.draw(st.integers(0, len(every.tokens)))
    rest = samples_after(
        "s", every.state_after(kept), ahead if every.state_after(kept).fragment == 0 else Ahead(), **how
    )
    behind = [(one, first) for one, first in zip(every.tokens.tolist(), every.first.tolist(), strict=True)][kept:]
    assert list(zip(rest.tokens.tolist(), rest.first.tolist(), strict=True)) == behind
    for record, tokens in enumerate(whole.tokens.tolist()):
        mine = every.record == record
        assert every.tokens[mine].sum() + every.lost[record] == tokens
        assert every.first[mine].tolist() == [0, *np.cumsum(every.tokens[mine]).tolist()][: mine.sum()]
        if whole.documents is not None and len(own := whole.documents[record]):
            assert np.cumsum(every.tokens[mine]).tolist() == own.tolist()


@pytest.mark.parametrize("into", [1, 4, 6])
def test_a_cursor_within_a_document_is_refused(into: int) -> None:
    known = Heads(np.array([6]), documents=Ragged(np.array([3, 5]), np.array([2])))
    ahead = Ahead([Piece(BlockHead(BlockAddress(0, 0, 0), 1, BlockAddress(1, 0, 0)), 0, known)])
    with pytest.raises(ValueError, match=f"source s: {into} tokens of its next record end within a document"):
        samples_after("s", SourceState("i", "l", into=into), ahead, sequence_length=8, long=Long.SPLIT, skips=None)
