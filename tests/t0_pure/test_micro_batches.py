"""Files of micro-batches against files of ranks, and decoded files split into what their micro-batches' files hold."""

from __future__ import annotations

import hashlib
import io
import itertools
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from step_tasks import EXAMPLE, tasks

from stepfs.errors import WrongTypeError
from stepfs.torch import micro_batches
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec

LOADERS = {
    ".safetensors": safetensors.torch.load,
    ".pt": lambda payload: torch.load(io.BytesIO(payload), weights_only=True),
}


def made(ext: str, task=EXAMPLE) -> tuple[list[bytes], list[bytes]]:
    """Files of ranks, and of micro-batches."""
    spec = PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=1 << 20)
    whole, records = construct(spec, task)
    parts, of_parts = construct(replace(spec, of_micro_batch=True), task)
    assert (len(parts), sum(of_parts)) == (task.shape[0] * task.shape[1], sum(records))
    return whole, parts


def same(left: dict, right: dict) -> None:
    assert set(left) == set(right)
    for name, value in left.items():
        other = right[name]
        if isinstance(value, torch.Tensor | np.ndarray):
            assert (value.dtype, value.shape) == (other.dtype, other.shape), name
            assert (value == other).all(), name
        else:
            assert value == other


@pytest.mark.parametrize("ext", LOADERS)
@given(tasks())
@settings(max_examples=40)
def test_the_parts_of_a_ranks_file_are_the_files_of_its_micro_batches(ext, drawn):
    whole, parts = made(ext, drawn[0])
    split = itertools.chain(*(micro_batches(LOADERS[ext](payload)) for payload in whole))
    for left, right in zip(split, map(LOADERS[ext], parts), strict=True):
        same(left, right)
        same(micro_batches(right)[0], right)


@given(tasks())
def test_other_files_of_micro_batches_are_the_parts_of_a_ranks_file(drawn):
    whole, parts = made(".bin", drawn[0])
    assert b"".join(whole) == b"".join(parts)
    whole, parts = made(".npy", drawn[0])
    stacked = np.concatenate([np.load(io.BytesIO(payload)) for payload in whole], axis=1)
    assert (stacked == np.concatenate([np.load(io.BytesIO(payload)) for payload in parts], axis=1)).all()
    whole, parts = made(".tar", drawn[0])
    assert [tar_members(whole, "padding"), tar_members(parts, "padding")] == [tar_members(whole, "padding")] * 2


def tar_members(payloads: list[bytes], apart: str) -> list[tuple[str, bytes]]:
    """Names and contents; samples of padding alone have no place in the corpus to be named for."""
    found = []
    for payload in payloads:
        with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
            for member in archive:
                body = archive.extractfile(member).read()
                name = member.name if not member.name.startswith(apart) else apart
                found.append((name, body))
    return found


def test_tokens_are_not_copied_and_the_file_stays_as_it_was():
    for load in (safetensors.torch.load, safetensors.numpy.load):
        batch = load(made(".safetensors")[0][0])
        before = {name: value.tolist() for name, value in batch.items()}
        for micro, part in enumerate(micro_batches(batch)):
            for name in ("input_ids", "labels", "position_ids", "doc_ids"):
                assert np.shares_memory(np.asarray(part[name]), np.asarray(batch[name])), name
            assert part["cu_seqlens"][0] == 0
            assert part["cu_seqlens"][-1] == part["input_ids"].shape[1]
            assert part["spans"].tolist() == [[0, *row[1:]] for row in before["spans"] if row[0] == micro]
        assert {name: value.tolist() for name, value in batch.items()} == before


@pytest.mark.parametrize("batch", [{}, {"input_ids": torch.zeros(2, 4)}, [1], b"x", torch.zeros(4, 2, 8), None])
def test_what_no_plan_made_is_refused_with_the_other_way(batch):
    with pytest.raises(WrongTypeError, match=r"no decoded .pt or .safetensors of a plan.*output.files: micro_batches"):
        micro_batches(batch)


def test_default_plans_write_the_bytes_that_they_always_wrote():
    digests = {
        ext: hashlib.sha256(b"".join(made(ext)[0])).hexdigest()[:16] for ext in (".safetensors", ".npy", ".tar", ".bin")
    }
    assert digests == {
        ".safetensors": "b82dd600628186f4",
        ".npy": "d5528fe19dc18298",
        ".tar": "804947b8912eecea",
        ".bin": "a1c089c046f95c34",
    }
