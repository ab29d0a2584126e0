"""What a run knows of a source: any span of any group is found again, and what lies before the cursor is let go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from stepfs_producer.engine.retry import KeptBody
from stepfs_producer.payloads.step import NO_TOKEN, SampleGroup, gathered
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.samples import BlockHead, Heads, samples_after
from stepfs_producer.plan.sources import Long
from stepfs_producer.plan.step import SourceState, State, StepPlan
from stepfs_producer.run.load import SampleBuffer, SampleChunk, spans_of

BLOCKS = st.lists(st.lists(st.integers(-1, 5), max_size=9), min_size=1, max_size=4)


@dataclass(frozen=True)
class Here:
    """A body by value."""

    samples: SampleGroup
    nbytes: int = 7


async def never() -> Here:
    raise AssertionError("it is here")


def held_of(blocks: list[list[int]], group: int, *, masked: bool) -> tuple[SampleBuffer, dict]:
    """Groups of `group` records; token t of the document (block, record) is 1000 * block + 100 * record + t."""
    held, documents = SampleBuffer(), {}
    for number, lengths in enumerate(blocks):
        for first in range(0, max(len(lengths), 1), group):
            part = lengths[first : first + group]
            ids = []
            for record, length in enumerate(part, first):
                documents[number, record] = [1000 * number + 100 * record + token for token in range(max(length, 0))]
                ids += documents[number, record]
            array = np.array(ids, np.int32)
            mask = (array % 2).astype(np.uint8) if masked and number % 2 else None
            where = np.arange(first, first + len(part), dtype=np.int64)
            ends = np.cumsum(np.array([max(length, 0) for length in part], np.int64))
            samples = SampleGroup(Ragged(array, ends), mask, where + 7, where * 11)
            held.add(
                SampleChunk(
                    BlockHead(BlockAddress(0, number, 0), len(lengths), BlockAddress(0, number + 1, 0)),
                    first,
                    Heads(np.array(part, np.int64)),
                    KeptBody(Here(samples), never, lambda _: None) if part else None,
                )
            )
    return held, documents


def planned(spans: list[tuple[int, ...]]) -> StepPlan:
    """A step of these (source, fragment, record, first token, tokens), in this order, of a rank that has all of them."""
    table = np.zeros((len(spans), 11), np.int64)
    table[:, [5, 7, 9, 10, 4]] = np.array(spans, np.int64).reshape(-1, 5)
    costs = np.zeros((1, 1), np.int64)
    return StepPlan(0, 8, (1, 1, 1), ("code", "prose"), (1, 1), table, costs, 0, {}, State("d", 1, {}))


@given(BLOCKS, BLOCKS, st.integers(1, 5), st.booleans(), st.data())
def test_any_span_is_found_with_its_address_and_the_token_that_follows_it(code, prose, group, masked, data):
    buffers = [held_of(blocks, group, masked=masked) for blocks in (code, prose)]
    spans, expected = [], []
    for source, (_, documents) in enumerate(buffers):
        for (number, record), tokens in documents.items():
            if not tokens or not data.draw(st.booleans()):
                continue
            first = data.draw(st.integers(0, len(tokens) - 1))
            count = data.draw(st.integers(1, len(tokens) - first))
            spans.append((source, number, record, first, count))
            expected.append(tokens[first : first + count + 1])
    assume(spans)
    order = data.draw(st.permutations(range(len(spans))))
    spans, expected = [spans[one] for one in order], [expected[one] for one in order]
    groups = {name: tuple(held.groups) for name, (held, _) in zip(("code", "prose"), buffers, strict=True)}
    step, bodies = spans_of(planned(spans), groups)
    assert len(set(bodies)) == len(bodies)
    here = [body.reference for body in bodies]
    found = gathered(step, [one.samples for one in here if isinstance(one, Here)])
    at = 0
    for index, (span, tokens) in enumerate(zip(spans, expected, strict=True)):
        source, number, record, first, count = span
        assert found.ids[at : at + count].tolist() == tokens[:count]
        assert found.following[index] == (tokens[count] if len(tokens) > count else NO_TOKEN)
        assert found.spans[index].tolist() == [0, 0, 0, 0, count, source, 0, record + 7, record * 11, first]
        odd = [token % 2 if masked and number % 2 else 1 for token in tokens]
        mask = np.ones(at + count, np.uint8) if found.mask is None else found.mask
        following = 1 if found.following_mask is None else found.following_mask[index]
        assert mask[at : at + count].tolist() == odd[:count]
        assert following == (odd[count] if len(tokens) > count else 1)
        at += count
    assert at == len(found.ids)


@given(BLOCKS, st.integers(1, 5), st.data())
def test_what_lies_before_the_cursor_is_let_go_and_nothing_else(blocks, group, data) -> None:
    held, _ = held_of(blocks, group, masked=True)
    number = data.draw(st.integers(0, len(blocks) - 1))
    taken = data.draw(st.integers(0, max(len(blocks[number]) - 1, 0)))
    before = list(held.groups)
    held.forget_before(SourceState("i", "l", fragment=number, taken=taken))
    kept = [
        one
        for one in before
        if one.block.place.fragment > number
        or (one.block.place.fragment == number and (one.first + one.records > taken or not one.block.records))
    ]
    assert list(held.groups) == kept
    assert held.tokens == sum(one.tokens for one in kept)
    assert held.nbytes == sum(one.nbytes for one in kept)


@given(BLOCKS, st.integers(1, 5), st.data())
def test_the_planner_sees_as_many_records_from_the_cursor_on_as_hold_the_tokens_it_asked_for(blocks, group, data):
    held, _ = held_of(blocks, group, masked=False)
    number = data.draw(st.integers(0, len(blocks) - 1))
    taken = data.draw(st.integers(0, max(len(blocks[number]) - 1, 0)))
    cursor = SourceState("i", "l", fragment=number, taken=taken)
    held.forget_before(cursor)
    held.ended = True
    whole = [
        length
        for fragment, lengths in enumerate(blocks)
        for record, length in enumerate(lengths)
        if (fragment, record) >= (number, taken)
    ]
    tokens = data.draw(st.integers(0, 40))
    ahead, complete = held.ahead(tokens)
    found = [length for piece in ahead.pieces for length in piece.heads.tokens.tolist()]
    assert found == whole[: len(found)]
    assert complete == ahead.ended == (sum(max(length, 0) for length in whole) <= tokens)
    assert sum(max(length, 0) for length in found) <= tokens
    if complete:
        assert found == whole
    else:
        assert sum(max(length, 0) for length in whole[: len(found) + 1]) > tokens
    samples_after("s", cursor, ahead, sequence_length=8, long=Long.SPLIT, skips=None)  # refuses gaps


@given(BLOCKS, st.integers(1, 5), st.data())
def test_a_step_gets_the_groups_up_to_its_cursor(blocks, group, data) -> None:
    held, _ = held_of(blocks, group, masked=False)
    number = data.draw(st.integers(0, len(blocks) - 1))
    taken = data.draw(st.integers(0, max(len(blocks[number]) - 1, 0)))
    got = held.until(SourceState("i", "l", fragment=number, taken=taken))
    assert list(got) == [one for one in held.groups if (one.block.place.fragment, one.first) <= (number, taken)]
