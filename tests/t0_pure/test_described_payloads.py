"""The schemas that `stepfs-produce` records are what its encoders write, and what PAYLOADS.md says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from step_tasks import EXAMPLE, tasks

from stepfs.errors import RefusedError
from stepfs.format.payload.check import PayloadCheck
from stepfs.format.payload.excerpt import Excerpt
from stepfs.format.payload.schema import ArraySpec, stored_schema
from stepfs.torch.table import torch_arrays
from stepfs_producer.payloads.described import (
    planned_schema,
    refuse_other_arrays,
)
from stepfs_producer.payloads.encode import construct
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.transforms.model_tokenizer import open_tokenizer
from stepfs_producer.transforms.spec import TokenizerSpec

PAGE = (Path(__file__).resolve().parents[2] / "producer/PAYLOADS.md").read_text()
PLANNED = (".pt", ".safetensors", ".npy", ".tar", ".bin")


def facts():
    return open_tokenizer(TokenizerSpec()).facts(None)


def problem(ext, schema, payload):
    assert stored_schema(schema.text(), "lake") == schema
    return PayloadCheck(ext, schema, torch_arrays).problem(Excerpt.of(payload))


@pytest.mark.parametrize("ext", PLANNED)
def test_every_rank_of_a_planned_step_is_as_its_schema_says(ext):
    payloads, _ = construct(PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=11), EXAMPLE)
    schema = planned_schema(ext, facts(), vocabulary=11)
    assert [problem(ext, schema, payload) for payload in payloads] == [None, None]


@pytest.mark.parametrize("ext", PLANNED)
@pytest.mark.parametrize("vocabulary", [11, 70_000])
def test_a_shape_that_never_changes_is_a_promise(ext, vocabulary):
    payloads, _ = construct(PayloadSpec(ext, True, 0, vocabulary), EXAMPLE)
    schema = planned_schema(ext, facts(), vocabulary=vocabulary, shape=(3, 8))
    assert [problem(ext, schema, payload) for payload in payloads] == [None, None]
    if ext != ".tar":
        longer = planned_schema(ext, facts(), vocabulary=vocabulary, shape=(4, 8))
        assert problem(ext, longer, payloads[0]) is not None


@given(tasks())
@settings(max_examples=30)
def test_any_planned_step_is(task):
    payloads, _ = construct(PayloadSpec(".safetensors", labels_shifted=False, padding=0, vocabulary=999), task[0])
    for payload in payloads:
        assert problem(".safetensors", planned_schema(".safetensors", {}, vocabulary=999), payload) is None


def test_the_page_and_the_schemas_agree():
    rows = re.findall(r"^\| `(\w+)` \| \[(.*?)\] \| (\w+) \|", PAGE, re.MULTILINE)
    said = {name: (dtype, len(shape.split(","))) for name, shape, dtype in rows}
    schema = planned_schema(".pt", {}, vocabulary=258)
    assert said == {name: (spec.dtype, len(spec.shape)) for name, spec in schema.arrays.items()}


def test_a_tokenizer_is_named_with_what_a_reader_needs():
    assert facts() == {"kind": "bytes", "identity": "bytes", "vocabulary": 258, "eos": 256, "pad": 257}
    plan = open_tokenizer(TokenizerSpec(eos="none"))
    assert plan.facts("ab" * 32) == {
        "kind": "bytes",
        "identity": "bytes",
        "vocabulary": 258,
        "pad": 257,
        "file_sha256": "ab" * 32,
    }


def test_what_a_lake_does_not_promise_is_refused_and_another_tokenizer_told():
    made = planned_schema(".pt", facts(), vocabulary=258)
    assert refuse_other_arrays("lake", made, None) is None
    assert refuse_other_arrays("lake", made, made) is None
    assert refuse_other_arrays("lake", made, replace(made, arrays=None, tokenizer={})) is None
    told = refuse_other_arrays("lake", made, replace(made, tokenizer={"identity": "bpe-1"}))
    assert "tokenizer bpe-1, and these are made with bytes" in told
    arrays = dict(made.arrays)
    for changed, says in (
        ({**arrays, "more": arrays["labels"]}, "its schema names the array 'more'"),
        ({name: spec for name, spec in arrays.items() if name != "spans"}, "does not name the array 'spans'"),
        (
            {**arrays, "labels": ArraySpec("int32", ("a", "b"))},
            r"says 'labels' is int32 \[a, b\], not int64 \[micro, t",
        ),
        ({**arrays, "labels": ArraySpec("int64", (None,))}, r"says 'labels' is int64 \[\?\], not"),
        ({**arrays, "spans": ArraySpec("int64", (None, 6))}, r"is int64 \[\?, 6\], not int64 \[spans, 8\]"),
    ):
        with pytest.raises(RefusedError, match=f"^lake: .*{says}.*fork this one"):
            refuse_other_arrays("lake", made, replace(made, arrays=changed))
    with pytest.raises(RefusedError, match="says npy files, not pt"):
        refuse_other_arrays("lake", made, planned_schema(".npy", {}, vocabulary=258))
    narrowed = {**arrays, "labels": ArraySpec("int64", (4, 8192)), "input_ids": ArraySpec("int64", (4, None))}
    assert refuse_other_arrays("lake", made, replace(made, arrays=narrowed)) is None
