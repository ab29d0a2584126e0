"""The schemas that `stepfs-produce` records are what its encoders write, and what PAYLOADS.md says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from step_tasks import EXAMPLE, tasks

from stepfs.format.payload.check import PayloadCheck
from stepfs.format.payload.excerpt import Excerpt
from stepfs.format.payload.schema import stored_schema
from stepfs.torch.table import torch_arrays
from stepfs_producer.payloads.columns import ColumnSpec
from stepfs_producer.payloads.described import empty_payloads, planned_schema
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


@pytest.mark.parametrize("of_micro_batch", [False, True])
@pytest.mark.parametrize("ext", PLANNED)
def test_an_empty_step_has_the_arrays_of_every_step(ext, of_micro_batch):
    spec = PayloadSpec(ext, True, 257, 258, of_micro_batch, (ColumnSpec("pixels", "float32", (3,), own_file=True),))
    payload, *beside = empty_payloads(spec, (3, 8))
    shape = (1 if of_micro_batch else 3, 8)
    schema = planned_schema(ext, facts(), vocabulary=258, shape=shape, columns=spec.columns)
    own, *_ = (
        [schema]
        if schema.arrays is None
        else [replace(schema, arrays={name: one for name, one in schema.arrays.items() if not one.file})]
    )
    assert problem(ext, own, payload) is None
    assert len(beside) == (1 if ext in {".pt", ".safetensors", ".tar"} else 0)
