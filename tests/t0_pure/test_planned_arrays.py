"""The arrays of a planned step: every token once, labels across cuts, segments that are documents."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from step_tasks import Part, task_of, tasks

from stepfs_producer.payloads.files import IGNORED, NO_DOCUMENT, rank_arrays
from stepfs_producer.payloads.step import NO_TOKEN

N = IGNORED
STEP = [
    Part((0, 0, 0, 0), [1, 2, 3], address=(1, 0, 4, 50, 0)),
    Part((0, 0, 0, 3), [5, 6, 7], following=8),  # cut by the end of its row
    Part((0, 0, 1, 0), [8, 9], address=(0, 0, 0, 0, 3)),  # its rest; then padding
    Part((0, 1, 1, 0), [11, 12, 13, 14, 15, 16], mask=[0, 0, 1, 1, 0, 1], following=17, following_learned=False),
    Part((1, 0, 0, 0), [21], following=22),
]


def one(shifted: bool = True) -> list:
    return list(rank_arrays(task_of((2, 2, 2), 6, STEP, ("a", "b")), padding=99, labels_shifted=shifted))


def test_a_small_step_exactly() -> None:
    first, second = one()
    assert first.input_ids.tolist() == [
        [1, 2, 3, 5, 6, 7, 8, 9, 99, 99, 99, 99],
        [99, 99, 99, 99, 99, 99, 11, 12, 13, 14, 15, 16],
    ]
    assert first.labels.tolist() == [[2, 3, N, 6, 7, 8, 9, N, N, N, N, N], [N, N, N, N, N, N, N, 13, 14, N, 16, N]]
    assert first.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5]]
    assert first.doc_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, -1, -1, -1, -1], [-1] * 6 + [0] * 6]
    assert first.cu_seqlens.tolist() == [0, 3, 6, 8, 12, 0, 6, 12]
    assert first.cu_seqlens_offsets.tolist() == [0, 5, 8]
    assert first.spans.tolist() == [
        [0, 0, 3, 1, 0, 4, 50, 0], [0, 3, 3, 0, 0, 0, 0, 0], [0, 6, 2, 0, 0, 0, 0, 3], [1, 6, 6, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert first.sources == ("a", "b")
    assert second.input_ids.tolist() == [[21] + [99] * 11, [99] * 12]
    assert second.labels.tolist() == [[22] + [N] * 11, [N] * 12]
    assert second.cu_seqlens.tolist() == [0, 1, 6, 12, 0, 6, 12]
    assert second.cu_seqlens_offsets.tolist() == [0, 4, 7]


def test_labels_same_are_the_ids() -> None:
    first, _ = one(shifted=False)
    assert first.labels.tolist() == [[1, 2, 3, 5, 6, 7, 8, 9, N, N, N, N], [N, N, N, N, N, N, N, N, 13, 14, N, 16]]


def test_dtypes_and_a_rank_without_a_token() -> None:
    arrays = list(rank_arrays(task_of((3, 1, 1), 2, [Part((1, 0, 0, 0), [7, 8])]), padding=0, labels_shifted=True))
    for rank in arrays:
        names = ("input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "cu_seqlens_offsets")
        assert {getattr(rank, name).dtype for name in names} == {np.dtype(np.int32)}
        assert rank.spans.dtype == np.int64
        assert rank.cu_seqlens.tolist() == [0, 2]
        assert rank.spans.shape[1] == 8
    assert [len(rank.spans) for rank in arrays] == [0, 1, 0]
    assert arrays[0].doc_ids.tolist() == [[-1, -1]]


@given(tasks(), st.booleans())
@settings(max_examples=150)
def test_every_token_stands_once_and_segments_are_documents(drawn, shifted: bool) -> None:
    task, parts = drawn
    ranks = list(rank_arrays(task, padding=1 << 20, labels_shifted=shifted))
    assert len(ranks) == task.shape[0]
    found: list[tuple[list[int], list[int], int]] = []
    for arrays in ranks:
        offsets = arrays.cu_seqlens_offsets.tolist()
        spans = {(m, s): (n, *rest) for m, s, n, *rest in arrays.spans.tolist()}
        for micro in range(task.shape[1]):
            bounds = arrays.cu_seqlens[offsets[micro] : offsets[micro + 1]].tolist()
            assert bounds[0] == 0
            assert bounds[-1] == task.shape[2] * task.sequence_length
            assert bounds == sorted(set(bounds))
            number = 0
            for begin, end in itertools.pairwise(bounds):
                here = (micro, slice(begin, end))
                ids, labels = arrays.input_ids[here].tolist(), arrays.labels[here].tolist()
                if arrays.doc_ids[micro, begin] == NO_DOCUMENT:
                    assert set(ids) == {1 << 20}
                    assert set(labels) == {IGNORED}
                    assert set(arrays.position_ids[here].tolist()) == {0}
                    assert set(arrays.doc_ids[here].tolist()) == {NO_DOCUMENT}
                    assert begin // task.sequence_length == (end - 1) // task.sequence_length
                    continue
                assert set(arrays.doc_ids[here].tolist()) == {number}
                assert arrays.position_ids[here].tolist() == list(range(end - begin))
                size, source, *_, offset, first = spans.pop((micro, begin))
                assert size == end - begin
                found.append((ids, labels, offset, first, source))
                number += 1
        assert not spans
    assert found == [
        (part.ids, expected_labels(part, shifted), part.address[3], part.address[4], part.address[0]) for part in parts
    ]


def expected_labels(part: Part, shifted: bool) -> list[int]:
    mask = part.mask if part.mask is not None else [1] * len(part.ids)
    own = [number if bit else IGNORED for number, bit in zip(part.ids, mask, strict=True)]
    if not shifted:
        return own
    learned = part.following != NO_TOKEN and part.following_learned
    return [*own[1:], part.following if learned else IGNORED]
