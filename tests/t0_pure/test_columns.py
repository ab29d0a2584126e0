"""Columns: from what a transform returns to the arrays of a file, always with their tokens (hazard P17)."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_tasks import EXAMPLE, tasks
from test_transform import made, records_of

from stepfs.torch import micro_batches
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import Columns, ColumnSpec, PayloadSpec, StepTask, ColumnRows, cut_to, gathered_columns
from stepfs_producer.sources.record import Kind
from stepfs_producer.transforms.documents import TokenizerSpec, TransformSpec

GRID, PIXELS = ColumnSpec("grid", "int32", (3,)), ColumnSpec("pixels", "uint8", (6,))
SPECS = (GRID, PIXELS)
CALLED = TransformSpec(TokenizerSpec(eos="none"), "user_functions:pictured", SPECS)


def columns_of(counts: list[tuple[int, int]]) -> Columns:
    """Samples whose rows say whose they are."""
    return Columns.of_samples(
        SPECS,
        [
            {
                "grid": np.full((grid, 3), sample, np.int32),
                "pixels": np.full((pixels, 6), sample % 251, np.uint8),
            }
            for sample, (grid, pixels) in enumerate(counts)
        ],
    )


COUNTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=9)


@given(COUNTS, st.data())
def test_a_part_and_some_of_the_samples_keep_their_rows(counts, data) -> None:
    whole = columns_of(counts)
    first = data.draw(st.integers(0, len(counts)))
    last = data.draw(st.integers(first, len(counts)))
    inside = np.zeros(len(counts), np.bool_)
    inside[first:last] = True
    some = np.array(data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))))
    for got, chosen in ((whole.part(first, last), inside), (whole.kept(some), some)):
        samples = np.flatnonzero(chosen)
        assert got.counts.tolist() == [list(counts[sample]) for sample in samples]
        for column, rows in enumerate(got.rows):
            expected = [sample % 251 for sample in samples for _ in range(counts[sample][column])]
            assert rows[:, 0].tolist() == expected
            assert rows.dtype == SPECS[column].dtype


@given(st.lists(COUNTS, min_size=1, max_size=3), st.data())
def test_gathering_puts_rows_in_the_order_of_the_spans(groups, data) -> None:
    samples = [(group, sample) for group, counts in enumerate(groups) for sample in range(len(counts))]
    order = data.draw(st.permutations(samples))
    spans = order[: data.draw(st.integers(0, len(order)))]
    taken = []
    for number, counts in enumerate(groups):
        mine = [(sample, span) for span, (group, sample) in enumerate(spans) if group == number]
        numbers = np.array(mine, np.int64).reshape(-1, 2)
        taken.append(ColumnRows(columns_of(counts), numbers[:, 0], numbers[:, 1]))
    got = gathered_columns(len(spans), taken)
    assert got.counts.tolist() == [list(groups[group][sample]) for group, sample in spans]
    for column, rows in enumerate(got.rows):
        expected = [sample for group, sample in spans for _ in range(groups[group][sample][column])]
        assert rows[:, 0].tolist() == expected
    assert gathered_columns(5, []) is None


def test_rows_in_another_order_than_their_spans_would_be_noticed(monkeypatch) -> None:
    """The mutant of hazard P17: rows as groups come."""
    held = columns_of([(1, 1), (1, 2)])
    taken = [ColumnRows(held, np.array([1]), np.array([1])), ColumnRows(held, np.array([0]), np.array([0]))]
    assert gathered_columns(2, taken).rows[1][:, 0].tolist() == [0, 1, 1]
    monkeypatch.setattr("stepfs_producer.payloads.step.sorted", list, raising=False)
    assert gathered_columns(2, taken).rows[1][:, 0].tolist() == [1, 1, 0]


def called(*values: dict):
    return made(CALLED, records_of(Kind.JSON, [json.dumps(value).encode() for value in values]))


def test_what_a_function_gives_is_copied_and_stays_with_its_sample() -> None:
    result = called(
        {"pixels": 1},
        {"pixels": 2, "rows": 1, "columns": {"grid": ["int32", [2, 3]]}, "value": 9},
        {"ids": [], "pixels": 3},  # no token: no sample, so no row either
        {"text": "abc", "pixels": 4, "rows": 2},
        {"ids": [1]},
        {"ids": [1], "pixels": 5, "rows": 0},
    )
    assert result.bad == {}
    assert result.lengths.tolist() == [2, 2, 0, 3, 1, 1]
    assert result.columns.counts.tolist() == [[0, 4], [2, 1], [0, 0], [0, 2], [0, 0], [0, 0]]
    assert result.columns.rows[1][:, 0].tolist() == [1, 1, 1, 1, 2, 4, 4]
    assert result.columns.rows[0].tolist() == [[9, 9, 9]] * 2
    plain = TransformSpec(TokenizerSpec(eos="none"), "user_functions:pictured")
    assert made(plain, records_of(Kind.JSON, [b"{}"])).columns is None


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"columns": {"pixel": ["uint8", [1, 6]]}, "value": 0}, "'pixel', which the plan does not declare; did you"),
        ({"columns": {"audio": ["uint8", [1]]}, "value": 0}, "'audio', which the plan does not declare; declare it"),
        ({"columns": {"pixels": ["int8", [1, 6]]}, "value": 0}, "'pixels' as int8 [1, 6], declared as uint8 [rows, 6]"),
        ({"columns": {"pixels": ["uint8", [1, 7]]}, "value": 0}, "'pixels' as uint8 [1, 7], declared as uint8 [rows, 6]"),
        ({"columns": {"pixels": ["uint8", [6]]}, "value": 0}, "'pixels' as uint8 [6], declared as uint8 [rows, 6]"),
        ({"raw": {"grid": 3}}, "'grid' as int64 [], declared as int32 [rows, 3]"),
        ({"raw": {"grid": [[1], [1, 2]]}}, "the column 'grid' that is no array"),
        ({"raw": [1]}, "columns of type list; return arrays by name"),
    ],
)  # fmt: skip
def test_what_is_not_as_declared_makes_that_record_bad(record, why) -> None:
    result = called({"pixels": 7}, record)
    assert result.lengths.tolist() == [2, -1]
    assert why in result.bad[1]
    assert result.bad[1].startswith("user_functions:pictured returned ")
    assert result.columns.counts.tolist() == [[0, 4], [0, 0]]


def with_columns(task: StepTask) -> StepTask:
    return replace(task, columns=columns_of([(span % 2, span % 3) for span in range(len(task.spans))]))


def spec_of(ext: str, *, own: bool = False, of_micro_batch: bool = False) -> PayloadSpec:
    columns = (GRID, replace(PIXELS, own_file=own))
    return PayloadSpec(ext, True, 0, 1 << 20, of_micro_batch, columns)


def opened(ext: str, payload: bytes) -> dict:
    if ext == ".pt":
        return torch.load(io.BytesIO(payload), weights_only=True)
    return {name: torch.from_numpy(array) for name, array in safetensors.numpy.load(payload).items()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ext", [".safetensors", ".pt"])
@settings(max_examples=20, deadline=None)
@given(drawn=tasks())
def test_a_file_has_the_rows_of_its_spans_as_declared(ext, own, drawn) -> None:
    task = with_columns(drawn[0])
    spec = spec_of(ext, own=own)
    payloads, records = construct(spec, task)
    each = 2 if own else 1
    assert len(payloads) == len(records) == each * task.shape[0]
    assert records[0::each] == np.bincount(task.spans[:, 0], minlength=task.shape[0]).tolist()
    assert not own or records[1::2] == [0] * task.shape[0]
    for rank in range(task.shape[0]):
        batch = opened(ext, payloads[each * rank])
        beside = opened(ext, payloads[each * rank + 1]) if own else batch
        spans = np.flatnonzero(task.spans[:, 0] == rank)
        assert batch["grid_counts"].tolist() == (spans % 2).tolist()
        assert batch["pixels_counts"].tolist() == (spans % 3).tolist()
        assert batch["grid"].tolist() == [[span] * 3 for span in spans for _ in range(span % 2)]
        assert beside["pixels"].tolist() == [[span % 251] * 6 for span in spans for _ in range(span % 3)]
        assert ("pixels" in batch) is not own
        for file, column in ((batch, "grid"), (beside, "pixels")):
            declared = next(each for each in SPECS if each.name == column)
            assert (str(file[column].dtype), file[column].shape[1:]) == (f"torch.{declared.dtype}", declared.shape)
        assert batch["grid_counts"].dtype == batch["pixels_counts"].dtype == torch.int32
    assert construct(spec, cut_to(task, [0]))[0] == payloads[:each]


@pytest.mark.parametrize("ext", [".safetensors", ".pt"])
@pytest.mark.parametrize("own", [False, True])
@settings(max_examples=20, deadline=None)
@given(drawn=tasks())
def test_the_micro_batches_of_a_file_have_their_own_rows(ext, own, drawn) -> None:
    task = with_columns(drawn[0])
    whole, _ = construct(spec_of(ext, own=own), task)
    parts, _ = construct(spec_of(ext, own=own, of_micro_batch=True), task)
    each = 2 if own else 1
    split = [part for payload in whole[::each] for part in micro_batches(opened(ext, payload))]
    alone = [opened(ext, payload) for payload in parts[::each]]
    assert len(split) == len(alone)
    for part, file in zip(split, alone, strict=True):
        arrays = {name: value.tolist() for name, value in file.items() if isinstance(value, torch.Tensor)}
        assert {name: part[name].tolist() for name in arrays} == arrays


@pytest.mark.parametrize("own", [False, True])
def test_a_tar_has_them_in_each_sample(own) -> None:
    payloads, _ = construct(spec_of(".tar", own=own), with_columns(EXAMPLE))
    read = []
    for payload in payloads:
        with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
            names = [name for name in archive.getnames() if name.split(".")[1] in {"pixels", "grid_counts"}]
            members = {name: np.load(io.BytesIO(archive.extractfile(name).read())).tolist() for name in names}
            read.append({name.split(".", 1)[1]: value for name, value in members.items() if "padding" not in name})
    if own:
        assert read[0].keys() == {"grid_counts.npy"}
        assert read[1] == {"pixels.npy": [[1] * 6]}  # of the third micro-batch; the first has none, of the same key
    else:
        assert read[0] == {"grid_counts.npy": [1], "pixels.npy": [[1] * 6]}
    assert len(read) == (4 if own else 2)


def test_a_step_without_rows_has_the_arrays_all_the_same() -> None:
    payloads, _ = construct(spec_of(".safetensors"), EXAMPLE)
    batch = opened(".safetensors", payloads[0])
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((0, 6), torch.uint8)
    assert batch["grid_counts"].tolist() == [0, 0]
    plain = replace(spec_of(".safetensors"), columns=())
    assert "pixels" not in opened(".safetensors", construct(plain, EXAMPLE)[0][0])
