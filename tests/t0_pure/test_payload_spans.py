"""The spans of a payload: those that a planned step wrote, in every format that has room; none and damage are told apart."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from payload_samples import framed, npy, pt, safetensors
from step_tasks import EXAMPLE, tasks

from stepfs.payload import COLUMNS, NoSpansError, Spans, UnreadablePayloadError, read_spans
from stepfs_producer.payloads.files import construct, rank_arrays
from stepfs_producer.payloads.step import PayloadSpec, StepTask, cut_to

FORMATS = (".safetensors", ".pt", ".tar")


def spans_of(ext: str, task: StepTask) -> list[Spans]:
    payloads, _ = construct(PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=1 << 20), task)
    return [read_spans(ext, payload) for payload in payloads]


@pytest.mark.parametrize("ext", FORMATS)
@settings(max_examples=25, deadline=None)
@given(drawn=tasks())
def test_spans_and_tokens_of_any_step_are_read_back(ext, drawn) -> None:
    task, parts = drawn
    read = spans_of(ext, task)
    arrays = list(rank_arrays(task, padding=0, labels_shifted=True))
    for spans, rank in zip(read, arrays, strict=True):
        assert spans.sources == task.sources
        assert (spans.table == rank.spans).all()
        assert (spans.ids == rank.input_ids).all()
    found = [ids.tolist() for spans in read for ids in map(spans.ids_of, range(len(spans.table)))]
    assert found == [part.ids for part in parts]


@pytest.mark.parametrize(
    ("ext", "payload"), [
        (".npy", npy(np.zeros((4, 1, 8), np.int32))), (".bin", b"\0" * 8),
        (".safetensors", safetensors(input_ids=np.zeros((1, 8), np.int64))), (".pt", pt({"x": 1})),
    ],
)  # fmt: skip
def test_a_payload_without_spans_is_said_to_have_none(ext, payload) -> None:
    with pytest.raises(NoSpansError, match=r"no room for spans|has no spans"):
        read_spans(ext, payload)


def planned(table: object, ids: object = None, sources: object = '["a"]', **facts: str) -> bytes:
    given = np.zeros((1, 8), np.int64) if ids is None else np.asarray(ids)
    plain = safetensors(input_ids=given, spans=np.asarray(table))
    size = int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8 : 8 + size])
    return framed({"__metadata__": {"sources": sources, **facts}, **header}, plain[8 + size :])


GOOD = [0, 0, 8, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "payload", [
        planned([[1, *GOOD[1:]]]), planned([[0, 1, *GOOD[2:]]]),
        planned([[0, 1 << 62, 1 << 62, *GOOD[3:]]]), planned([[*GOOD[:3], 1, *GOOD[4:]]]),
        planned([[*GOOD[:4], -1, *GOOD[5:]]]), planned([GOOD[:-1]]), planned(GOOD), planned([GOOD], ids=[0, 1]),
        planned([GOOD], sources="{"), planned([GOOD], sources="7"), planned(np.zeros((1, 8), np.float32)),
    ],
)  # fmt: skip
def test_spans_that_do_not_fit_are_damage(payload) -> None:
    assert len(read_spans(".safetensors", planned([GOOD])).table) == 1
    with pytest.raises(UnreadablePayloadError) as caught:
        read_spans(".safetensors", payload)
    assert not isinstance(caught.value, NoSpansError)


def test_columns_of_a_later_version_are_left_out_and_its_layout_is_refused() -> None:
    later = planned([[*GOOD, 7, 1]], span_columns=json.dumps([*COLUMNS, "tag", "pair"]), layout="1", kept="as it is")
    assert read_spans(".safetensors", later).table.tolist() == [[*GOOD, 1]]
    with pytest.raises(UnreadablePayloadError, match="is of layout 2, and this stepfs reads 1; upgrade stepfs"):
        read_spans(".safetensors", planned([GOOD], layout="2"))
    with pytest.raises(UnreadablePayloadError, match="spans"):
        read_spans(".safetensors", planned([GOOD], span_columns="7"))


@pytest.mark.parametrize("ext", FORMATS)
def test_flipped_bytes_are_read_or_refused(ext) -> None:
    payloads, _ = construct(PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=11), EXAMPLE)
    draw = random.Random(4)
    for _ in range(150):
        damaged = bytearray(payloads[0])
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(min(len(damaged), 3000))] ^= 1 << draw.randrange(8)
        try:
            spans = read_spans(ext, bytes(damaged[: draw.choice([len(damaged), len(damaged) // 2])]))
        except UnreadablePayloadError:
            continue
        assert spans.table.shape[1] == len(COLUMNS)
        assert all(len(spans.ids_of(row)) == spans.table[row, 2] for row in range(len(spans.table)))


@settings(max_examples=40, deadline=None)
@given(drawn=tasks())
def test_a_task_cut_to_some_ranks_makes_their_payloads(drawn) -> None:
    task, _ = drawn
    spec = PayloadSpec(".safetensors", labels_shifted=True, padding=0, vocabulary=1 << 20)
    payloads, records = construct(spec, task)
    for ranks in ((), (0,), tuple(range(1, task.shape[0])), tuple(range(0, task.shape[0], 2))):
        made, counts = construct(spec, cut_to(task, ranks))
        assert made == [payloads[rank] for rank in ranks]
        assert counts == [records[rank] for rank in ranks]
