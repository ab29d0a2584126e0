"""What a run holds of a source: any span of any group is found again, and what lies before the cursor is let go."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepfs_producer.payloads.step_task import NO_TOKEN
from stepfs_producer.plan.samples import Long, samples_after
from stepfs_producer.plan.state import SourceState
from stepfs_producer.run.sample_buffer import GatheredTokens, Group, SampleBuffer, gather
from stepfs_producer.sources.block import BlockAddress
from stepfs_producer.transforms.documents import Tokenised

BLOCKS = st.lists(st.lists(st.integers(-1, 5), max_size=9), min_size=1, max_size=4)


def held_of(blocks: list[list[int]], group: int, *, masked: bool) -> tuple[SampleBuffer, dict]:
    """Groups of `group` records; token t of the document (block, record) is 1000 * block + 100 * record + t."""
    held, documents = SampleBuffer(), {}
    for number, lengths in enumerate(blocks):
        for first in range(0, max(len(lengths), 1), group):
            part = lengths[first : first + group]
            ids = []
            for record, length in enumerate(part, first):
                documents[number, record] = [
                    1000 * number + 100 * record + token for token in range(max(length, 0))
                ]
                ids += documents[number, record]
            array = np.array(ids, np.int32)
            mask = (array % 2).astype(np.uint8) if masked and number % 2 else None
            where = np.arange(first, first + len(part), dtype=np.int64)
            held.add(
                Group(
                    BlockAddress(0, number, 0),
                    first,
                    len(lengths),
                    BlockAddress(0, number + 1, 0),
                    Tokenised(np.array(part, np.int64), array, mask),
                    where + 7,
                    where * 11,
                )
            )
    return held, documents


@given(BLOCKS, st.integers(1, 5), st.booleans(), st.data())
def test_any_span_is_found_with_its_address_and_the_token_that_follows_it(
    blocks, group, masked, data
) -> None:
    held, documents = held_of(blocks, group, masked=masked)
    spans, expected = [], []
    for (number, record), tokens in sorted(documents.items()):
        if not tokens or not data.draw(st.booleans()):
            continue
        first = data.draw(st.integers(0, len(tokens) - 1))
        count = data.draw(st.integers(1, len(tokens) - first))
        spans.append((0, number, 0, record, first, count))
        expected.append(tokens[first : first + count + 1])
    table = np.array(spans, np.int64).reshape(-1, 6)
    found = GatheredTokens.room_for(len(table), int(table[:, 5].sum()), masked=masked)
    ends = np.cumsum(table[:, 5])
    gather(tuple(held.groups), table, np.arange(len(table)), ends - table[:, 5], found)
    at = 0
    for index, (span, tokens) in enumerate(zip(spans, expected, strict=True)):
        count = span[5]
        assert found.ids[at : at + count].tolist() == tokens[:count]
        assert found.following[index] == (tokens[count] if len(tokens) > count else NO_TOKEN)
        assert (found.files[index], found.offsets[index]) == (span[3] + 7, span[3] * 11)
        if found.mask is not None:
            odd = [token % 2 if span[1] % 2 else 1 for token in tokens]
            assert found.mask[at : at + count].tolist() == odd[:count]
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
        if one.place.fragment > number
        or (one.place.fragment == number and (one.first + one.records > taken or not one.block_records))
    ]
    assert list(held.groups) == kept
    assert held.tokens == sum(one.tokens for one in kept)
    assert held.nbytes == sum(one.nbytes for one in kept)


@given(BLOCKS, st.integers(1, 5), st.data())
def test_the_planner_sees_as_many_records_from_the_cursor_on_as_hold_the_tokens_it_asked_for(
    blocks, group, data
) -> None:
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
    found = [length for piece in ahead.pieces for length in piece.tokens.tolist()]
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
    assert list(got) == [one for one in held.groups if (one.place.fragment, one.first) <= (number, taken)]
