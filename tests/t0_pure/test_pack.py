"""Packing: the stream, cut into rows and steps, is the source again; any cursor continues it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfs_producer.text.construct import construct
from stepfs_producer.text.pack import IGNORED, NO_DOCUMENT, Cursor, Rows, pack
from stepfs_producer.text.records import Place, Record
from stepfs_producer.transforms.tokenize import BpeTokenizer, ByteTokenizer, LosslessTokenizer, train_bpe

BYTES = ByteTokenizer()
BPE = BpeTokenizer(train_bpe([b"the cat and the other cat sat on the mat " * 20], 300))
documents = st.lists(st.binary(max_size=60) | st.sampled_from([b"the cat", b"and the mat " * 5]), max_size=12)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 24))


def records(texts: list[bytes]) -> list[Record]:
    places = [Place(f"{n:03d}", 0, 0) for n in range(len(texts) + 1)]
    return [Record(f"doc{n}", 7 * n, text, places[n], places[n + 1]) for n, text in enumerate(texts)]


def gathered(steps: list[Rows], tokenizer: LosslessTokenizer) -> dict[str, bytes]:
    """Document → bytes, from spans and tokens; fails on a hole or an overlap."""
    found: dict[str, tuple[int, bytes]] = {}
    for step in steps:
        for span in step.spans:
            start, held = found.get(span.document, (span.offset, b""))
            assert span.offset == start + len(held)
            data = tokenizer.decode(step.input_ids[span.row, span.column : span.column + span.tokens])
            assert len(data) == span.size
            found[span.document] = (start, held + data)
    return {name: data for name, (_, data) in found.items()}


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(texts=documents, shape=shapes)
@settings(max_examples=150)
def test_spans_and_tokens_give_every_source_byte_once(
    tokenizer: LosslessTokenizer, texts: list[bytes], shape: tuple[int, int]
) -> None:
    steps = list(pack(records(texts), tokenizer, rows=shape[0], seq_len=shape[1]))
    assert gathered(steps, tokenizer) == {f"doc{n}": text for n, text in enumerate(texts)}
    stream = np.concatenate([step.input_ids.ravel() for step in steps]) if steps else np.array([])
    expected = [id_ for text in texts for id_ in [*tokenizer.encode(text).tolist(), tokenizer.end]]
    assert stream[: len(expected)].tolist() == expected
    assert set(stream[len(expected) :].tolist()) <= {tokenizer.padding}
    assert sum(step.tokens for step in steps) == len(expected)
    assert sum(step.documents for step in steps) == len(texts)
    assert sum(step.source_bytes for step in steps) == sum(map(len, texts))
    assert len(stream) - len(expected) < shape[0] * shape[1]


@given(texts=documents, shape=shapes)
@settings(max_examples=150)
def test_labels_positions_and_boundaries(texts: list[bytes], shape: tuple[int, int]) -> None:
    steps = list(pack(records(texts), BYTES, rows=shape[0], seq_len=shape[1]))
    stream = [int(i) for step in steps for i in step.input_ids.ravel()]
    labels = [int(i) for step in steps for i in step.labels.ravel()]
    for at, (token, label) in enumerate(zip(stream, labels, strict=True)):
        if token in (BYTES.end, BYTES.padding):
            assert label == IGNORED
        else:
            assert label == stream[at + 1]
    for step in steps:
        covered = np.zeros(shape, bool)
        for span in step.spans:
            part = (span.row, slice(span.column, span.column + span.tokens))
            assert not covered[part].any()
            covered[part] = True
            assert step.position_ids[part].tolist() == list(range(span.tokens))
            assert len(set(step.doc_ids[part].tolist())) == 1
        assert (covered == (step.input_ids != BYTES.padding)).all()
        assert (step.doc_ids[~covered] == NO_DOCUMENT).all()
        for row in range(shape[0]):
            ids = [i for i in step.doc_ids[row].tolist() if i != NO_DOCUMENT]
            assert sorted(set(ids)) == list(range(len(set(ids))))
            assert ids == sorted(ids)


@given(texts=documents, shape=shapes, data=st.data())
@settings(max_examples=150)
def test_resuming_at_any_cursor_gives_the_same_remaining_stream(
    texts: list[bytes], shape: tuple[int, int], data: st.DataObject
) -> None:
    source = records(texts)
    steps = list(pack(source, BYTES, rows=shape[0], seq_len=shape[1]))
    if not steps:
        return
    cut = data.draw(st.integers(0, len(steps) - 1))
    cursor: Cursor = steps[cut].cursor
    rest = [record for record in source if record.here.name >= cursor.place.name]
    again = list(pack(rest, BYTES, rows=shape[0], seq_len=shape[1], start=cursor))
    assert len(again) == len(steps) - cut - 1
    for one, other in zip(steps[cut + 1 :], again, strict=True):
        assert (one.input_ids == other.input_ids).all()
        assert (one.labels == other.labels).all()
        assert one.spans == other.spans
        assert one.cursor == other.cursor


@given(texts=documents, slices=st.integers(1, 4), share=st.integers(1, 3), seq_len=st.integers(1, 24))
@settings(max_examples=100)
def test_slices_read_in_order_are_the_rows_again(
    texts: list[bytes], slices: int, share: int, seq_len: int
) -> None:
    for rows in pack(records(texts), BYTES, rows=slices * share, seq_len=seq_len):
        batches = construct(rows, slices=slices, stream="0-of-1", first_row=100)
        assert (np.concatenate([batch.input_ids for batch in batches]) == rows.input_ids).all()
        assert [batch.first_row for batch in batches] == [100 + share * n for n in range(slices)]
        spans = [
            (row + share * n, column, tokens, batch.sources[source], offset, size)
            for n, batch in enumerate(batches)
            for row, column, tokens, source, offset, size in batch.spans.tolist()
        ]
        assert spans == [(s.row, s.column, s.tokens, s.document, s.offset, s.size) for s in rows.spans]


def test_no_documents_no_steps() -> None:
    assert list(pack([], BYTES, rows=2, seq_len=8)) == []
