"""Documents of Megatron's indexed datasets: each in exactly one block; a wrong index is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sourced import blocks, laid_out, source, values

from stepfs.errors import AbsentError, CorruptError, UsageError


def write_megatron(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8, *, modes: bool = False
) -> Path:
    dtype = {4: "<i4", 5: "<i8", 8: "<u2"}[code]
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths.astype("<i8") * width)[:-1]])[: len(lengths)].astype("<i8")
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    tail = bytes(len(lengths)) if modes else b""
    (path / "a.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes() + tail)
    (path / "a.bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    return path / "a.bin"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=3), min_size=1, max_size=20),
    st.sampled_from([4, 5, 8]),
    st.sampled_from([8, 16, 64]),
    st.booleans(),
)
def test_every_document_of_an_indexed_dataset_is_in_one_block(tmp_path_factory, documents, code, least, modes) -> None:
    flat = [[token for sequence in document for token in sequence] for document in documents]
    expected = [np.array(document, "<i4").tobytes() for document in flat if document]
    if not expected:
        return
    path = write_megatron(tmp_path_factory.mktemp("megatron"), documents, code, modes=modes)
    spec = source(path, form="megatron", shuffle=False, block_bytes=100)
    found = blocks(spec, laid_out(spec, range_bytes_min=least))
    assert values(found) == expected
    assert [one for block in found for one in block.records.offsets.tolist()] == [
        number for number, document in enumerate(flat) if document
    ]


def drop_index(path: Path) -> None:
    path.with_suffix(".idx").unlink()


def damage_index(path: Path) -> None:
    path.with_suffix(".idx").write_bytes(b"MMIDIDY\0\0" + bytes(40))


def float_index(path: Path) -> None:
    data = bytearray(path.with_suffix(".idx").read_bytes())
    data[17] = 6
    path.with_suffix(".idx").write_bytes(data)


def shift_pointers(path: Path) -> None:
    data = bytearray(path.with_suffix(".idx").read_bytes())
    data[34 + 4 * 3 + 8] += 2
    path.with_suffix(".idx").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (drop_index, AbsentError, "has no .idx file beside it"),
        (damage_index, CorruptError, "no Megatron index"),
        (float_index, UsageError, "data type 6"),
        (shift_pointers, CorruptError, "damaged Megatron index"),
        (lambda path: path.write_bytes(b"\0\0"), CorruptError, "damaged Megatron index"),
    ],
)
def test_a_wrong_index_is_refused_by_name(tmp_path, change: Callable[[Path], None], kind, said) -> None:
    path = write_megatron(tmp_path, [[[1, 2]], [[3]], [[4]]])
    assert len(values(blocks(source(str(path)[:-4], form="megatron")))) == 3  # named as Megatron does
    change(path)
    with pytest.raises(kind, match=said):
        blocks(source(tmp_path, form="megatron"))
