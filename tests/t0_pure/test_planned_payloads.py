"""Files of a planned step, each read by the library that trainers read it with, as the page of payloads says."""

import hashlib
import io
import json
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import step_tasks
import torch
import webdataset
from finished import ran
from hypothesis import given, settings
from step_tasks import EXAMPLE, tasks

from stepfs.errors import UsageError
from stepfs_producer.payloads.files import RankArrays, construct, rank_arrays
from stepfs_producer.payloads.step import PayloadSpec

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


@pytest.mark.parametrize("ext", [".safetensors", ".npy", ".pt", ".tar", ".bin"])
def test_another_process_makes_the_same_bytes(ext: str) -> None:
    program = (
        "import sys, hashlib; from step_tasks import EXAMPLE; from stepfs_producer.payloads.step import PayloadSpec;"
        "from stepfs_producer.payloads.files import construct;"
        f"print(hashlib.sha256(b''.join(construct(PayloadSpec({ext!r}, True, 0, 11), EXAMPLE)[0])).hexdigest())"
    )
    other = ran([sys.executable, "-c", program], check=True, cwd=Path(step_tasks.__file__).parent)
    own = hashlib.sha256(b"".join(construct(spec(ext), TASK)[0])).hexdigest()
    assert other.stdout.strip() == own


def test_other_extensions_name_those_there_are() -> None:
    for ext in (".parquet", ""):
        with pytest.raises(UsageError, match=r"extension is one of \.safetensors \.npy \.pt \.tar \.bin"):
            construct(spec(ext), TASK)


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
            assert sample["json"] == {"spans": spans, "sources": ["code", "prosé"]}


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
    assert described(PAGE, sizes) == {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor)
    }
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
