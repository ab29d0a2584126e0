"""`output: {arrays: compact}`: fewer bytes, from which readers get back the full arrays."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_tasks import EXAMPLE, Part, task_of, tasks

from stepfs.payload import expand, read_spans
from stepfs.torch import micro_batches
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec, StepTask


def written(task: StepTask, spec: PayloadSpec) -> list[dict[str, Any]]:
    payloads, _ = construct(spec, task)
    if spec.ext == ".pt":
        return [torch.load(io.BytesIO(payload), weights_only=True) for payload in payloads]
    return [safetensors.numpy.load(payload) for payload in payloads]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    return bool(one == other)


@settings(max_examples=60)
@given(
    tasks(),
    st.sampled_from([".safetensors", ".pt"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1 << 20, 1 << 16]),
)
def test_expanded_arrays_are_the_full_ones(
    drawn: tuple[StepTask, list[Part]], ext: str, shifted: bool, by_micro: bool, vocabulary: int
) -> None:
    task, _ = drawn
    spec = PayloadSpec(ext, shifted, 0, max(vocabulary, int(task.ids.max(initial=0)) + 1), by_micro)
    for full, compact in zip(written(task, spec), written(task, replace(spec, compact=True)), strict=True):
        got = expand(compact)
        assert got.keys() == full.keys()
        assert [name for name in full if not same(got[name], full[name])] == []
        assert all(value is full[name] for name, value in expand(full).items())
        for mine, theirs in zip(micro_batches(compact), micro_batches(full), strict=True):
            assert [name for name in theirs if not same(mine[name], theirs[name])] == []


# Bytes a token of a step of rows of 4,096, by the vocabulary, the mean length of documents, and whether parts are masked.
@pytest.mark.parametrize(
    ("vocabulary", "length", "masked", "most"),
    [(50_000, 512, False, 2.2), (50_000, 512, True, 2.3), (150_000, 512, False, 4.4), (150_000, 512, True, 4.4)],
)
def test_bytes_a_token(vocabulary: int, length: int, masked: bool, most: float) -> None:
    draw = np.random.default_rng(7)
    ranks, rows, row = 1, 16, 4096
    parts = []
    for number in range(rows):
        column = 0
        while column < row:
            tokens = min(int(draw.integers(1, 2 * length)), row - column)
            ids = draw.integers(0, vocabulary, tokens).tolist()
            mask = draw.integers(0, 2, tokens).tolist() if masked else None
            parts.append(
                Part((0, 0, number, column), ids, mask=mask, address=(0, 1, 3, int(draw.integers(1 << 31)), 0))
            )
            column += tokens
    task = task_of((ranks, 1, rows), row, parts)
    spec = PayloadSpec(".safetensors", True, 0, vocabulary, compact=True)
    [payload], _ = construct(spec, task)
    assert len(payload) / len(task.ids) <= most
    [full], _ = construct(replace(spec, compact=False), task)
    assert len(full) / len(task.ids) > 24
    got = expand(safetensors.numpy.load(payload))
    assert [name for name, value in safetensors.numpy.load(full).items() if not same(got[name], value)] == []
    assert expand(safetensors.torch.load(payload))["labels"].dtype == torch.int64


def test_spans_of_compact_files_are_read() -> None:
    spec = PayloadSpec(".safetensors", True, 0, 11, compact=True)
    for payload, other in zip(
        construct(spec, EXAMPLE)[0], construct(replace(spec, compact=False), EXAMPLE)[0], strict=True
    ):
        mine, theirs = read_spans(".safetensors", payload), read_spans(".safetensors", other)
        assert (mine.sources, mine.table.tolist(), mine.ids.tolist()) == (
            theirs.sources,
            theirs.table.tolist(),
            theirs.ids.tolist(),
        )


def test_labels_are_made_as_the_page_says() -> None:
    """By its sentence alone: the span's next id, the last one of `last_labels`, −100 where the bit is 0."""
    parts = [Part((0, 0, 0, 0), [1, 2, 3], 4, mask=[1, 0, 1]), Part((0, 1, 0, 1), [5], following_learned=False)]
    for task in (EXAMPLE, task_of((1, 2, 1), 4, parts)):
        spec = PayloadSpec(".safetensors", True, 0, 11, compact=True)
        for compact in written(task, spec):
            labels = np.full(compact["input_ids"].shape, -100)
            for (micro, start, tokens, *_), last in zip(compact["spans"], compact["last_labels"], strict=True):
                labels[micro, start : start + tokens] = [*compact["input_ids"][micro, start + 1 : start + tokens], last]
            if "label_bits" in compact:
                labels[np.unpackbits(compact["label_bits"], 1, labels.shape[1], "little") == 0] = -100
            assert labels.tolist() == expand(compact)["labels"].tolist()
