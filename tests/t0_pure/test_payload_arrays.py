"""What payloads are known to hold: the kind of file, and its arrays."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_samples import bomb, framed, npy, pt
from payload_samples import safetensors as by_hand
from step_tasks import EXAMPLE

from stepfs.format.grid import Grid
from stepfs.format.identity import (
    CHECKED_EXTENSIONS,
    HEAD_BYTES,
    LakeIdentity,
    decode_lake,
    encode_lake,
    is_checkable,
    payload_problem,
)
from stepfs.payload import UnreadablePayloadError, read_arrays
from stepfs.torch import dump
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec

PAGE = (Path(__file__).resolve().parents[2] / "producer/PAYLOADS.md").read_text()
TOKENS = EXAMPLE.shape[2] * EXAMPLE.sequence_length
KNOWN = (
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.float64,
    torch.bfloat16, torch.complex64,
)  # fmt: skip


def read(ext, payload):
    return {array.name: array for array in read_arrays(ext, payload).arrays}


@pytest.mark.parametrize(
    ("array", "dtype"), [
        (np.zeros((2, 3), np.int32), "int32"), (np.zeros(0, np.uint16), "uint16"),
        (np.zeros((), np.float64), "float64"), (np.zeros((4, 1), np.bool_), "bool"),
        (np.zeros(3, np.complex64), "complex64"), (np.zeros(2, ">i4"), ">i4"), (np.zeros(2, "<U3"), "<U3"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "int64"),
    ],
)  # fmt: skip
def test_npy_files_say_dtype_and_shape(array, dtype):
    found = read(".npy", npy(array))["array"]
    assert (found.dtype, found.shape, found.nbytes) == (dtype, array.shape, array.nbytes)
    assert found.values.tolist() == array.tolist()


@pytest.mark.parametrize("ext", [".safetensors", ".pt", ".pth", ".rows.PT"])
def test_the_libraries_dtypes_and_values_are_read(ext):
    tensors = {str(dtype).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype) for dtype in KNOWN}
    payload = safetensors.torch.save(tensors, {"sources": "[]"}) if ext == ".safetensors" else pt(tensors)
    found = read(ext, payload)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        array = found[name]
        assert (array.dtype, array.shape, array.nbytes) == (name, (2, 3), tensor.nbytes)
        if array.values is not None:
            assert array.values.tolist() == tensor.tolist()
    unread = {name for name, array in found.items() if array.values is None}
    assert unread == (set() if ext == ".safetensors" else {"bfloat16"})
    if ext == ".safetensors":
        assert read_arrays(ext, payload).facts == {"sources": "[]"}


def test_a_pt_file_is_described_without_its_values():
    rows = torch.arange(6.0).reshape(2, 3)
    model = {"model": {"w": rows, "t": [rows.t(), rows[1:]]}, "step": 7, "raw": b"jpeg", "names": ["a"]}
    contents = read_arrays(".pt", pt(model), pt_values=False)
    assert [(array.name, array.shape, array.values) for array in contents.arrays] == [
        ("model.w", (2, 3), None), ("model.t.0", (3, 2), None), ("model.t.1", (1, 3), None),
    ]  # fmt: skip
    assert contents.facts == {"step": 7, "raw": "4 bytes", "names": ["a"]}
    assert read(".pt", pt(rows.t()))["array"].values.tolist() == rows.t().tolist()


def test_a_file_of_another_kind_has_none():
    for ext in (".tar", ".bin", ".json", ""):
        assert read_arrays(ext, b"{}") is None


@pytest.mark.parametrize(
    ("ext", "payload", "reason"),
    [
        (".safetensors", b"", r"is no \.safetensors file .*: it is empty"),
        (".npy", b"\x93NUMPY\x01", "can be read"),
        (".safetensors", (1 << 30).to_bytes(8, "little") + b"{" * 100, "is no .safetensors file"),
        (".safetensors", framed(b"{" * 100), "JSONDecodeError"),
        (".safetensors", framed(b'{"a":' * 5000), "RecursionError"),
        (".safetensors", framed({"a": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}}, bytes(8)), "can be read"),
        (".safetensors", framed({"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "can be read"),
        (".safetensors", framed({"a": {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}}, bytes(8)), "not in the file"),
        (".safetensors", framed({"a": {"dtype": "I64", "shape": [1], "data_offsets": [-8, 0]}}, bytes(8)), "not in the file"),
        (".safetensors", framed({"a": {"dtype": "I64", "shape": [1] * 99, "data_offsets": [0, 8]}}, bytes(8)), "can be read"),
        (".safetensors", framed({"a": {"dtype": "I64"}}, bytes(8)), "KeyError"),
        (".npy", npy(np.array([None]), allow_pickle=True), "allow_pickle"),
        (".npy", npy(np.zeros(4))[:-8], "can be read"),
        (".npy", b"\x93NUMPY\x02\x00\x00\x00\x00\x40", "can be read"),
        (".npy", b"\x93NUMPY\x01\x00\x05\x00{'a'}", "can be read"),
        (".npy", b"raw bytes", r"is no \.npy file \(what numpy.save writes\): it begins with b.raw"),
        (".pt", b"raw bytes", r"is no \.pt file"),
        (".pt", pt([1])[:-40], "can be read"),
        (".pt", bomb(), "GLOBAL exec "),
    ],
)  # fmt: skip
def test_what_is_damaged_or_hostile_is_refused_in_words(ext, payload, reason):
    for values in (True, False):
        with pytest.raises(UnreadablePayloadError, match=reason):
            read_arrays(ext, payload, pt_values=values)


SAMPLES = {
    ".npy": npy(np.arange(6).reshape(2, 3)),
    ".safetensors": by_hand(a=np.arange(6), b=np.arange(6, dtype=np.int32)),
    ".pt": pt({"a": torch.arange(6), "b": [1]}),
}


@given(
    st.sampled_from(sorted(SAMPLES)),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.integers(0, 3000),
)
def test_flipped_and_cut_bytes_raise_nothing_else(ext, changes, cut):
    payload = bytearray(SAMPLES[ext])
    for place, value in changes:
        payload[place % len(payload)] = value
    with suppress(UnreadablePayloadError):
        read_arrays(ext, bytes(payload[: max(0, len(payload) - cut)] if cut % 3 else payload))


@pytest.mark.parametrize("ext", [".pt", ".safetensors"])
def test_the_page_and_the_files_of_a_plan_agree(ext):
    full = PAGE.partition("## Compact arrays")[0]
    rows = re.findall(r"^\| `(\w+)` \| \[(.*?)\] \| (\w+) \|", full, re.MULTILINE)
    said = {name: (dtype, len(shape.split(","))) for name, shape, dtype in rows}
    payloads, _ = construct(PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=11), EXAMPLE)
    for payload in payloads:
        found = read(ext, payload)
        assert said == {name: (array.dtype, len(array.shape)) for name, array in found.items()}
        micro, tokens = found["input_ids"].shape
        assert (micro, tokens) == (EXAMPLE.shape[1], TOKENS)
        assert {found[name].shape for name in ("labels", "position_ids", "doc_ids")} == {(micro, tokens)}


@pytest.mark.parametrize(("vocabulary", "dtype"), [(11, np.uint16), (70_000, np.uint32)])
def test_formats_without_names_have_the_shapes_of_the_page(vocabulary, dtype):
    stacked, raw = (construct(PayloadSpec(ext, True, 0, vocabulary), EXAMPLE)[0] for ext in (".npy", ".bin"))
    for array, ids in zip(stacked, raw, strict=True):
        values = np.load(io.BytesIO(array))
        assert (values.dtype, values.shape) == (np.int32, (4, EXAMPLE.shape[1], TOKENS))
        assert np.frombuffer(ids, dtype).tolist() == values[0].reshape(-1).tolist()


ARRAY = np.arange(3)


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def tar(members: int) -> bytes:
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as archive:
        for number in range(members):
            archive.addfile(tarfile.TarInfo(str(number)))
    return file.getvalue()


def problem(ext: str, payload: bytes) -> str | None:
    return payload_problem(ext, payload[:HEAD_BYTES], len(payload))


FILES = {
    ".npy": [written(lambda file: np.save(file, ARRAY))],
    ".npz": [written(lambda file: np.savez(file, ARRAY)), written(np.savez)],
    ".pt": [dump({"a": 1}), dump(None)],
    ".safetensors": [safetensors.numpy.save({"a": ARRAY}), safetensors.numpy.save({})],
    ".tar": [tar(2), tar(0)],
    ".tar.gz": [gzip.compress(tar(1)), gzip.compress(b"")],
    ".zip": [written(lambda file: zipfile.ZipFile(file, "w").close())],
}


@pytest.mark.parametrize("ext", FILES)
def test_what_the_library_writes_passes(ext: str) -> None:
    assert [problem(ext, payload) for payload in FILES[ext]] == [None] * len(FILES[ext])
    assert [problem(ext.upper(), payload) for payload in FILES[ext]] == [None] * len(FILES[ext])


@pytest.mark.parametrize("ext", CHECKED_EXTENSIONS)
def test_raw_buffers_and_nothing_at_all_are_named(ext: str) -> None:
    for raw in (ARRAY.tobytes(), b"\1" * 600, b"\x93NUMP", b"\xff" * 9 + b"{"):
        assert f"no {ext} file" in str(problem(ext, raw))
        assert repr(raw[:12]) in str(problem(ext, raw))
    assert "is empty" in str(problem(ext, b""))


def test_a_safetensors_header_longer_than_its_slice_is_none() -> None:
    fine = safetensors.numpy.save({"a": ARRAY})
    assert problem(".safetensors", fine[:20]) is not None


@pytest.mark.parametrize("ext", [".bin", ".json", ".txt", ".gz.bin"])
def test_what_has_no_signature_is_not_judged(ext: str) -> None:
    assert not is_checkable(ext)
    assert problem(ext, b"anything") is None


def test_the_promise_survives_its_journey() -> None:
    promised = LakeIdentity("a" * 32, Grid(2), ".npy", 7, check_payload=True)
    assert decode_lake(encode_lake(promised), "lake") == promised
