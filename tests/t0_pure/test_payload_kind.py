"""What a file of each extension begins with: what its own library writes passes, a raw buffer does not."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy

from stepfs.format.grid import Grid
from stepfs.format.records import (
    CHECKED_EXTENSIONS,
    HEAD_BYTES,
    LakeIdentity,
    decode_lake,
    encode_lake,
    is_checkable,
    payload_problem,
)
from stepfs.torch import dump

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
