"""`pack: {align: N}`: each document takes a multiple of N tokens of its row, and nothing else changes."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import Corpus, rules
from planned import steps as plan_steps
from step_tasks import Part, task_of

from stepfs.errors import UsageError
from stepfs.format.mesh import parse_mesh
from stepfs.payload import expand
from stepfs.torch import by_source, context_parallel_part, micro_batches
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans, gathered
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.spans import Gathered, Span

LENGTHS = {0: 64}


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 60))
def test_planned_spans_begin_at_multiples_and_nothing_is_lost(align: int, longest: int) -> None:
    names = {"code": 30, "prose": 70}
    corpora = {name: Corpus(name, longest=longest) for name in names}
    steps = plan_steps(
        rules(names, lengths=LENGTHS, align=align, ranks=2, micro_batches=2, micro_batch_tokens=128), corpora, 6
    )
    assert len(steps) == 6
    for step in steps:
        table = step.spans
        assert (table[:, Span.COLUMN] % align == 0).all()
        room = -(-table[:, Span.TOKENS] // align) * align
        rows = np.unique(table[:, [Span.RANK, Span.MICRO, Span.ROW]], axis=0, return_inverse=True)[1].ravel()
        assert np.bincount(rows, weights=room).max() <= LENGTHS[0]
        same = rows[1:] == rows[:-1]
        assert (table[1:, Span.COLUMN][same] == (table[:-1, Span.COLUMN] + room[:-1])[same]).all()


@st.composite
def aligned(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A step whose spans begin at multiples."""
    align, multiples = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2)))
    length, parts, next_id = align * multiples, [], 1
    for rank, micro, row in np.ndindex(*shape):
        column = 0
        while column < length and draw(st.integers(0, 4)):
            tokens = draw(st.integers(1, length - column))
            mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
            follows = next_id + tokens if draw(st.booleans()) else -1
            source = draw(st.integers(0, 1))
            ids = list(range(next_id, next_id + tokens))
            parts.append(Part((rank, micro, row, column), ids, follows, mask, address=(source, 0, 0, next_id, 0)))
            column += -(-tokens // align) * align
            next_id += tokens + 1
    return task_of(shape, length, parts, ("code", "prose")), align, length


def batches(task: Any, spec: PayloadSpec) -> list[dict[str, Any]]:
    return [torch.load(io.BytesIO(payload), weights_only=True) for payload in construct(spec, task)[0]]


@settings(max_examples=60)
@given(aligned(), st.booleans())
def test_arrays_of_tokens_are_the_same_and_boundaries_are_padded(drawn: Any, shifted: bool) -> None:
    task, align, _ = drawn
    spec = PayloadSpec(".pt", shifted, 0, 1 << 16, align=align)
    for padded, plain, compact in zip(
        batches(task, spec),
        batches(task, replace(spec, align=1)),
        batches(task, replace(spec, compact=True)),
        strict=True,
    ):
        for name in ("input_ids", "labels", "position_ids", "doc_ids", "spans"):
            assert torch.equal(padded[name], plain[name]), name
        assert all(torch.equal(expand(compact)[name], padded[name]) for name in padded if name.startswith("cu_"))
        assert (padded["cu_seqlens"] % align == 0).all()
        for micro, one in enumerate(micro_batches(padded)):
            spans = padded["spans"][padded["spans"][:, 0] == micro]
            true = one.get("cu_seqlens_true", one["cu_seqlens"])
            assert len(true) == len(one["cu_seqlens"])
            if align > 1:
                filled = true.diff()[true.diff() > 0].tolist()
                assert filled == spans[:, 2].tolist()
                begins = one["cu_seqlens"][:-1][true.diff() > 0].tolist()
                assert begins == spans[:, 1].tolist()
                assert (true.diff() <= one["cu_seqlens"].diff()).all()


def test_both_documents_of_a_pair_begin_at_multiples() -> None:
    group = SampleGroup(
        Ragged(np.arange(1, 9, dtype=np.int32), np.array([8])),
        None,
        np.array([0]),
        np.array([5]),
        documents=Ragged(np.array([3, 8]), np.array([2])),
        sides=np.array([1]),
    )
    table = np.zeros((1, len(Gathered) + 7), np.int64)
    table[0, Span.TOKENS] = 8
    step = StepSpans((1, 1, 1), 16, ("pairs",), table[:, :10], np.zeros((1, 0), np.int64))
    [batch] = batches(
        gathered(step, [group], pairs=True, align=4), PayloadSpec(".pt", True, 0, 11, pairs=True, align=4)
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 12, 16]
    assert batch["cu_seqlens_true"].tolist() == [0, 3, 8, 8]
    assert batch["spans"][:, [1, 2, 8]].tolist() == [[0, 3, 1], [4, 5, 2]]


@settings(max_examples=40)
@given(aligned(), st.sampled_from([1, 2]))
def test_context_ranks_share_each_document_head_and_tail(drawn: Any, ranks: int) -> None:
    task, align, _ = drawn
    for batch in batches(task, PayloadSpec(".pt", True, 0, 1 << 16, align=align)):
        for one in micro_batches(batch):
            if align % (2 * ranks):
                if any(bound % (2 * ranks) for bound in one["cu_seqlens"].tolist()):
                    with pytest.raises(UsageError, match="multiples of"):
                        context_parallel_part(one, 0, ranks)
                continue
            parts = [context_parallel_part(one, rank, ranks) for rank in range(ranks)]
            assert [part["input_ids"].shape[1] for part in parts] == [one["input_ids"].shape[1] // ranks] * ranks
            everything = sorted(torch.cat([part["input_ids"] for part in parts], dim=1)[0].tolist())
            assert everything == sorted(one["input_ids"][0].tolist())
            for begin, end in zip(one["cu_seqlens"][:-1].tolist(), one["cu_seqlens"][1:].tolist(), strict=True):
                pieces = one["input_ids"][0, begin:end].chunk(2 * ranks)
                for rank, part in enumerate(parts):
                    here = part["input_ids"][0, begin // ranks : end // ranks]
                    assert torch.equal(here, torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]]))


@settings(max_examples=40)
@given(aligned())
def test_losses_by_source_are_those_of_its_tokens(drawn: Any) -> None:
    task, align, _ = drawn
    for batch in batches(task, PayloadSpec(".pt", True, 0, 1 << 16, align=align)):
        loss = batch["input_ids"].double()
        wanted: dict[str, list[float]] = {}
        for micro, start, tokens, source, *_ in batch["spans"].tolist():
            for place in range(start, start + tokens):
                if batch["labels"][micro, place] != -100:
                    wanted.setdefault(batch["sources"][source], []).append(float(loss[micro, place]))
        got = {name: (float(total), int(count)) for name, (total, count) in by_source(loss, batch).items()}
        assert got == {name: (sum(values), len(values)) for name, values in wanted.items()}


@pytest.mark.parametrize(
    ("mesh", "multiple"), [("dp=4", 1), ("dp=4,cp=2", 4), ("dp=2,cp=4,tp=8", 64), ("dp=2,tp=8", 8), ("pp=3,dp=2", 1)]
)
def test_multiple_of_a_mesh(mesh: str, multiple: int) -> None:
    assert parse_mesh(mesh).document_multiple == multiple
