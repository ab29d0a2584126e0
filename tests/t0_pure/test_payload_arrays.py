"""The arrays of a payload, from its header: what the libraries write is read, what a hostile writer makes is refused."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from payload_samples import framed, npy, safetensors
from safetensors.numpy import save

from stepfs.format.payload.arrays import read_arrays
from stepfs.format.payload.excerpt import HEAD_BYTES_MAX, TAIL_BYTES_MAX, Excerpt, UnreadablePayloadError

FORMATS = ("safetensors", "npy")


def read(format_name, payload):
    return read_arrays(format_name, Excerpt.of(payload))


def shown(format_name, payload):
    return [(array.name, array.dtype, array.shape) for array in read(format_name, payload).arrays]


@pytest.mark.parametrize(
    ("array", "dtype"), [
        (np.zeros((2, 3), np.int32), "int32"), (np.zeros(0, np.uint16), "uint16"),
        (np.zeros((), np.float64), "float64"), (np.zeros((4, 1), np.bool_), "bool"),
        (np.zeros(3, np.complex64), "complex64"),
        (np.zeros(2, ">i4"), "big-endian int32"), (np.zeros(2, "<U3"), "<U3"),
        (np.zeros(2, [("a", "i4")]), "a structured dtype"),
    ],
)  # fmt: skip
def test_npy_files_say_dtype_and_shape(array, dtype):
    assert shown("npy", npy(array)) == [("array", dtype, array.shape)]


def test_safetensors_say_names_and_places():
    ids, mask = np.arange(6).reshape(2, 3), np.ones(5, np.bool_)
    payload = safetensors(ids=ids, mask=mask)
    first, second = read("safetensors", payload).arrays
    assert (first.dtype, first.shape, second.dtype, second.shape) == ("int64", (2, 3), "bool", (5,))
    assert payload[first.offset : first.offset + first.nbytes] == ids.tobytes()
    assert payload[second.offset : second.offset + second.nbytes] == mask.tobytes()


def test_the_library_agrees_on_safetensors():
    payload = save({"a": np.zeros((3, 4), np.float32)}, metadata={"sources": "[]"})
    assert shown("safetensors", payload) == [("a", "float32", (3, 4))]
    assert read("safetensors", payload).facts == {"sources": "[]"}


@pytest.mark.parametrize(
    ("format_name", "payload", "reason"),
    [
        ("safetensors", b"", r"is no \.safetensors file .*: it is empty"),
        ("npy", b"\x93NUMPY\x01", "ends at byte 7, and byte 10 is needed"),
        ("safetensors", (1 << 30).to_bytes(8, "little") + b"{" * 100, "says a header of 1073741824 bytes"),
        ("safetensors", framed(b"{" * 100), "no JSON"),
        ("safetensors", framed(b'{"a":' * 5000), "no JSON"),
        ("safetensors", framed([]), "no map"),
        ("safetensors", framed({"a": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}}, bytes(8)), "damaged"),
        ("safetensors", framed({"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "damaged"),
        ("safetensors", framed({"a": {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}}, bytes(8)), "damaged"),
        ("safetensors", framed({"a": {"dtype": "I64", "shape": [1] * 99, "data_offsets": [0, 8]}}, bytes(8)), "damaged"),
        ("safetensors", framed(b" " * (HEAD_BYTES_MAX + TAIL_BYTES_MAX), bytes(HEAD_BYTES_MAX)), "does not lie in"),
        ("npy", npy(np.array([None]), allow_pickle=True), "Python objects"),
        ("npy", npy(np.zeros(4))[:-8], r"is float64 \[4\] and has 24 bytes"),
        ("npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30), "more than the 10000"),
        ("npy", b"\x93NUMPY\x01\x00\x05\x00{'a'}", "no header"),
        ("npy", b"raw bytes", r"is no \.npy file \(what numpy.save writes\): it begins with b.raw"),
        ("pt", b"raw bytes", r"is no \.pt file"),
        ("json", b"{}", "does not know"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_hostile_is_refused_in_words(format_name, payload, reason):
    with pytest.raises(UnreadablePayloadError, match=reason):
        read(format_name, payload)


def test_a_hostile_header_takes_little_memory():
    wide = b"[" + b"[]," * 300_000 + b"[]]"
    for format_name, payload in (("safetensors", framed(wide)),):
        tracemalloc.start()
        try:
            with suppress(UnreadablePayloadError):
                read(format_name, payload)
            assert tracemalloc.get_traced_memory()[1] < 80 << 20
        finally:
            tracemalloc.stop()


def test_the_ends_are_enough_for_a_payload_of_any_length():
    rows = np.zeros(HEAD_BYTES_MAX, np.int32)
    for format_name, payload in (("npy", npy(rows)), ("safetensors", safetensors(a=rows))):
        ends = Excerpt(memoryview(payload[:HEAD_BYTES_MAX]), memoryview(payload[-TAIL_BYTES_MAX:]), len(payload))
        assert read_arrays(format_name, ends) == read(format_name, payload)


@pytest.fixture(scope="module")
def samples():
    rows = np.arange(6).reshape(2, 3)
    return {
        "npy": npy(rows),
        "safetensors": safetensors(a=rows, b=rows.astype(np.int32)),
    }


@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.integers(0, 3000),
)
def test_flipped_and_cut_bytes_raise_nothing_else(samples, format_name, changes, cut):
    payload = bytearray(samples[format_name])
    for place, value in changes:
        payload[place % len(payload)] = value
    with suppress(UnreadablePayloadError):
        read(format_name, bytes(payload[: max(0, len(payload) - cut)] if cut % 3 else payload))
