"""The files of a planned step: arrays, formats, and micro-batches."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import struct
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import step_tasks
import torch
import webdataset
from finished import ran
from hypothesis import given, settings
from hypothesis import strategies as st
from step_tasks import EXAMPLE, Part, task_of, tasks

from stepfs.errors import UsageError, WrongTypeError
from stepfs.payload import SPAN_COLUMNS
from stepfs.torch import micro_batches
from stepfs_producer.payloads.files import NO_DOCUMENT, RankArrays, construct, rank_arrays
from stepfs_producer.payloads.step import NO_TOKEN, PayloadSpec
from stepfs_producer.plan.arrays import IGNORED

ALIGNED = task_of((1, 1, 1), 8, [Part((0, 0, 0, 0), [1, 2, 3], mask=[1, 0, 1]), Part((0, 0, 0, 4), [5, 6])])
PAGE = (Path(__file__).resolve().parents[2] / "producer/PAYLOADS.md").read_text()
TASK = EXAMPLE
PLANNED = ("input_ids", "labels", "position_ids", "doc_ids", "cu_seqlens", "cu_seqlens_offsets", "spans")


def spec(ext: str) -> PayloadSpec:
    return PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=11)


def arrays_of(rank: int) -> RankArrays:
    return list(rank_arrays(TASK, padding=0, labels_shifted=True))[rank]


def test_pt() -> None:
    payloads, records = construct(spec(".pt"), TASK)
    assert records == [2, 1]
    for rank, payload in enumerate(payloads):
        loaded = torch.load(io.BytesIO(payload), weights_only=True)
        check(loaded, rank)
        assert loaded["sources"] == ["code", "prosé"]
        assert loaded["sequence_length"] == 4


def test_safetensors(tmp_path: Path) -> None:
    payloads, _ = construct(spec(".safetensors"), TASK)
    for rank, payload in enumerate(payloads):
        path = tmp_path / "rank.safetensors"
        path.write_bytes(payload)
        with safetensors.safe_open(path, framework="pt") as file:
            check({name: file.get_tensor(name) for name in file.keys()}, rank)  # noqa: SIM118
            assert json.loads(file.metadata()["sources"]) == ["code", "prosé"]
            assert file.metadata()["sequence_length"] == "4"


def check(loaded: dict, rank: int) -> None:
    expected = arrays_of(rank)
    for name in PLANNED:
        wide = name in ("input_ids", "labels", "spans")
        assert loaded[name].dtype == (torch.int64 if wide else torch.int32), name
        assert loaded[name].tolist() == getattr(expected, name).tolist(), name
    lengths = loaded["cu_seqlens"][: loaded["cu_seqlens_offsets"][1]].diff()
    assert lengths.sum() == loaded["input_ids"].shape[1]


def test_npy(tmp_path: Path) -> None:
    payloads, _ = construct(spec(".npy"), TASK)
    for rank, payload in enumerate(payloads):
        path = tmp_path / "rank.npy"
        path.write_bytes(payload)
        stacked = np.load(path, mmap_mode="r")
        assert stacked.dtype == np.int32
        assert stacked.shape == (4, 3, 8)
        for name, array in zip(PLANNED[:4], stacked, strict=True):
            assert array.tolist() == getattr(arrays_of(rank), name).tolist()


@given(tasks())
@settings(max_examples=40)
def test_safetensors_of_any_step_are_read_by_the_library(drawn) -> None:
    task, _ = drawn
    payloads, records = construct(PayloadSpec(".safetensors", True, 0, 1 << 20), task)
    assert sum(records) == len(task.spans)
    for payload, arrays in zip(payloads, rank_arrays(task, padding=0, labels_shifted=True), strict=True):
        size = struct.unpack("<Q", payload[:8])[0]
        header = json.loads(payload[8 : 8 + size])
        wide = [entry["data_offsets"][0] for entry in header.values() if entry.get("dtype") == "I64"]
        assert (len(wide), {(8 + size + offset) % 8 for offset in wide}) == (3, {0}), "mapped arrays are aligned"
        loaded = safetensors.numpy.load(payload)
        for name in PLANNED:
            assert loaded[name].tolist() == getattr(arrays, name).tolist()


ELSEWHERE = """\
import hashlib, sys
from step_tasks import EXAMPLE
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec
for ext in sys.argv[1:]:
    print(hashlib.sha256(b"".join(construct(PayloadSpec(ext, True, 0, 11), EXAMPLE)[0])).hexdigest())
"""


@pytest.mark.nightly
def test_another_process_makes_the_same_bytes() -> None:
    kinds = [".safetensors", ".npy", ".pt", ".tar", ".bin"]
    other = ran([sys.executable, "-c", ELSEWHERE, *kinds], check=True, cwd=Path(step_tasks.__file__).parent)
    own = [hashlib.sha256(b"".join(construct(spec(ext), TASK)[0])).hexdigest() for ext in kinds]
    assert dict(zip(kinds, other.stdout.split(), strict=True)) == dict(zip(kinds, own, strict=True))


def test_other_extensions_name_those_there_are() -> None:
    for ext in (".parquet", ""):
        with pytest.raises(UsageError, match=r"extension is one of \.safetensors \.npy \.pt \.tar \.bin"):
            construct(spec(ext), TASK)


def test_a_loss_mask_is_never_lost_with_the_labels() -> None:
    masked = replace(TASK, mask=np.zeros(len(TASK.ids), np.uint8), following_mask=np.zeros(len(TASK.spans), np.uint8))
    with pytest.raises(
        UsageError, match=r"out of the loss, and \.bin files have no labels.*choose \.safetensors, \.npy"
    ):
        construct(spec(".bin"), masked)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves the file open
def test_tar(tmp_path: Path) -> None:
    for rank, payload in enumerate(construct(spec(".tar"), TASK)[0]):
        path = tmp_path / "rank.tar"
        path.write_bytes(payload)
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
        begun = [
            ["000-000-000000-000000000000-0000000", "padding-0001", "000-000-000000-000000000000-0000000"],
            ["001-002-000003-1099511627776-0000006", "padding-0001", "padding-0002"],
        ]
        assert [sample["__key__"] for sample in samples] == begun[rank]
        arrays = arrays_of(rank)
        for micro, sample in enumerate(samples):
            for name in PLANNED[:4]:
                assert sample[f"{name}.npy"].tolist() == getattr(arrays, name)[micro].tolist()
            spans = [row[1:] for row in arrays.spans.tolist() if row[0] == micro]
            named = {"layout": 1, "span_columns": list(SPAN_COLUMNS[1 : arrays.spans.shape[1]])}
            assert sample["json"] == {"spans": spans, "sources": ["code", "prosé"], **named}


@pytest.mark.parametrize(("vocabulary", "dtype"), [(258, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_bin(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    payloads, _ = construct(PayloadSpec(".bin", True, 0, vocabulary), TASK)
    for rank, payload in enumerate(payloads):
        path = tmp_path / "rank.bin"
        path.write_bytes(payload)
        ids = np.memmap(path, dtype=dtype, mode="r").reshape(3, 8)
        assert ids.tolist() == arrays_of(rank).input_ids.tolist()


def test_the_page_names_every_array_with_its_shape_and_dtype() -> None:
    micro, tokens = 3, 8
    sizes = {"micro": micro, "tokens": tokens, "micro + 1": micro + 1, "boundaries": 7 + 3, "spans": 2}
    loaded = torch.load(io.BytesIO(construct(spec(".pt"), TASK)[0][0]), weights_only=True)
    page, rest = PAGE.split("## Compact arrays")
    assert described(page, sizes) == {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor)
    }
    more = replace(spec(".pt"), compact=True, align=2)
    compact = torch.load(io.BytesIO(construct(more, ALIGNED)[0][0]), weights_only=True)
    for name, (shape, dtype) in described(rest.partition("## Columns")[0], sizes).items():
        assert (len(compact[name].shape), f"torch.{dtype}") == (len(shape), str(compact[name].dtype)), name
    columns = ("micro", "start", "tokens", "source", "epoch", "file", "offset", "first")
    assert ", ".join(f"`{name}`" for name in columns) in PAGE
    for ext in (".pt", ".safetensors", ".npy", ".tar", ".bin"):
        assert f"`{ext}`" in PAGE


def described(page: str, sizes: dict[str, int]) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = re.findall(r"^\| `(\w+)` \| \[(.*?)\] \| (int\d+)", page, re.MULTILINE)
    return {
        name: (tuple(int(size) if size.isdecimal() else sizes[size] for size in shape.split(", ")), dtype)
        for name, shape, dtype in rows
    }


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
    whole, parts = made(".bin", replace(drawn[0], mask=None, following_mask=None))
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
        ".safetensors": "efcd4181c51151a5",
        ".npy": "d5528fe19dc18298",
        ".tar": "48a5620854380465",
        ".bin": "a1c089c046f95c34",
    }
