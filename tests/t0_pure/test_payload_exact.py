"""A payload that the schema check accepts is one that the library of its format loads: nothing before, between, behind."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import warnings
from tokenize import TokenError

import numpy as np
import pytest
from payload_samples import framed, npy
from safetensors import SafetensorError
from safetensors.numpy import load

from stepfs.errors import UsageError
from stepfs.format.payload.arrays import _SAFETENSORS, read_arrays
from stepfs.format.payload.dtypes import DTYPE_BYTES, UNKNOWN_DTYPES
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import given_schema

ONE = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
SECOND = {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}
PLAIN = "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }"


def read(format_name, payload):
    return read_arrays(format_name, Excerpt.of(payload))


def headed(text: str | bytes, values: bytes = bytes(8), version: bytes = b"\x01\x00") -> bytes:
    """An npy file of any header."""
    data = text if isinstance(text, bytes) else text.encode("latin-1")
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(data)) + data + values


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (framed({"a": ONE}, bytes(9)), "has 1 bytes behind its last array"),
        (framed({}, bytes(1)), "has 1 bytes behind its last array"),
        (framed({"a": SECOND}, bytes(16)), "has values of 'a' at byte"),
        (framed({"a": ONE, "b": {**SECOND, "data_offsets": [56, 64]}}, bytes(64)), "has values of 'b' at byte"),
        (framed({"a": ONE, "b": ONE}, bytes(8)), "has values of 'b' at byte"),
        (framed(json.dumps({"a": ONE}).encode("utf-16-le"), bytes(8)), "no JSON"),
        (framed(json.dumps({"a": ONE}).encode("utf-16"), bytes(8)), "not UTF-8"),
        (framed(b"\xef\xbb\xbf" + json.dumps({"a": ONE}).encode(), bytes(8)), "no JSON"),
        (framed({"__metadata__": {"n": 1}, "a": ONE}, bytes(8)), "no map of text"),
        (framed({"__metadata__": {"n": "\ud800"}, "a": ONE}, bytes(8)), "no map of text"),
        (framed(b'{"a":{"dtype":"I64","shape":[1],"data_offsets":[-0,8]}}', bytes(8)), "damaged"),
        (framed({"__metadata__": [], "a": ONE}, bytes(8)), "no map of text"),
        (framed({"a": {**ONE, "more": float("nan")}}, bytes(8)), "NaN, which is no JSON"),
        (framed(b'{"a":{"dtype":"I64","dtype":"I64","shape":[1],"data_offsets":[0,8]}}', bytes(8)), "one name twice"),
    ],
)  # fmt: skip
def test_safetensors_that_the_library_refuses_are_refused(payload, reason):
    with pytest.raises(SafetensorError):
        load(payload)
    with pytest.raises(UnreadablePayloadError, match=reason):
        read("safetensors", payload)


@pytest.mark.parametrize(
    "payload",
    [
        framed({}),
        framed({"__metadata__": None, "a": ONE}, bytes(8)),
        framed({"b": SECOND, "empty": {"dtype": "I64", "shape": [0], "data_offsets": [8, 8]}, "a": ONE}, bytes(16)),
        framed(b" " + json.dumps({"a": ONE}).encode() + b"  ", bytes(8)),
    ],
)  # fmt: skip
def test_safetensors_that_the_library_loads_are_read(payload):
    assert {array.name for array in read("safetensors", payload).arrays} == set(load(payload))


@pytest.mark.parametrize(
    "payload", [
        headed(PLAIN, version=b"\x09\x00"), headed(PLAIN, version=b"\x01\x07"), headed(PLAIN, version=b"\x00\x00"),
        headed(PLAIN.replace("}", "'more': 1}")),
        headed("garbage 'descr': '<i8' 'shape': (1,) 'fortran_order': True"), headed(PLAIN + "garbage"),
        headed(PLAIN[:-1] + "'x': __import__('os')}"), headed(PLAIN.replace("False", "0")),
        headed(PLAIN.replace("(1,)", "[1]")), headed(PLAIN.replace("(1,)", "(1)")),
        headed(PLAIN.replace("(1,)", "(-1,)")), headed(PLAIN.replace("'<i8'", "8")),
        headed(PLAIN.replace("'<i8'", "'bfloat16'").replace("1,", "4,")),
        headed(PLAIN.replace("'descr'", "b'descr'")),
        headed(PLAIN.encode("utf-8") + b"\xff", version=b"\x03\x00"), headed("(" * 9000),
        headed("[1]" * 3000),
    ],
)  # fmt: skip
def test_npy_files_that_numpy_refuses_are_refused_without_a_warning(payload):
    with (
        pytest.raises((ValueError, TypeError, SyntaxError, MemoryError, TokenError, RecursionError)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        np.load(io.BytesIO(payload))
    with pytest.raises(UnreadablePayloadError):
        read("npy", payload)


@pytest.mark.parametrize("text", ["1" * 9000 + "!", "1" * 9000, "'" + "a" * 9000, "[" * 9000, "1," * 4500 + "!"])
def test_a_long_header_that_is_none_is_refused_at_once(text):
    """A pattern that tries every division of it into tokens would take longer than the universe has."""
    with pytest.raises(UnreadablePayloadError):
        read("npy", headed(text))


@pytest.mark.parametrize("text", ["1if 2else 3", r"'\d'", "1or 2", "0x1for x in y"])
def test_text_that_the_parser_warns_of_is_not_parsed(text):
    with pytest.raises(UnreadablePayloadError, match="no header"):
        read("npy", headed(text))


def test_npy_files_of_each_version_and_order_are_read():
    names = np.dtype([("a'\\\n", "<i4"), ("b\u00e9", "<f8", (2, 2)), ("c\u4e2d", [("d", "<M8[s]")])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of version 3
        payloads = [npy(np.zeros(2, names)), npy(np.asfortranarray(np.zeros((2, 3)))), npy(np.zeros((0, 2)))]
    for payload in (
        *payloads,
        *(headed(PLAIN, version=bytes([number, 0])) for number in (1, 2, 3)),
        headed(PLAIN + " " * 20 + "\n"),
        headed(PLAIN.replace("'", '"').replace("(1,)", "(1, )")),
        headed(PLAIN.replace("<i8", "int64")),
    ):
        [found] = read("npy", payload).arrays
        assert found.shape == np.load(io.BytesIO(payload)).shape


def test_an_npy_header_of_hostile_text_takes_little_memory():
    for text in (
        "[" + "[]," * 3300 + "]",
        "(" * 9999,
        "{" + "'a':{}," * 1400 + "}",
        "[1]" * 3300,
        "()" * 4999,
    ):
        tracemalloc.start()
        try:
            with pytest.raises(UnreadablePayloadError, match="no header"):
                read("npy", headed(text))
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("array", "name"), [
        (np.zeros(2, "<M8[ns]"), "datetime64[ns]"),
        (np.zeros(2, ">M8[25s]"), "big-endian datetime64[25s]"),
        (np.zeros(2, "<m8[D]"), "timedelta64[D]"), (np.zeros(2, "<m8"), "timedelta64"), (np.zeros(2, "V3"), "|V3"),
    ],
)  # fmt: skip
def test_npy_files_name_dtypes_that_a_schema_cannot(array, name):
    assert [each.dtype for each in read("npy", npy(array)).arrays] == [name]


@pytest.mark.parametrize(
    ("ext", "name", "spec", "words"),
    [
        (".bin", "x", {"dtype": "int8", "shape": ["n", 0]}, "no payload tells the open dimension"),
        (".bin", "x", {"dtype": "int8", "shape": [0, None]}, "no payload tells the open dimension"),
        (".npy", "array", {"dtype": "bfloat16", "shape": [1]}, "npy files cannot hold bfloat16"),
        (".safetensors", "x", {"dtype": "complex128", "shape": [1]}, "safetensors files cannot hold complex128"),
    ],
)  # fmt: skip
def test_a_schema_that_no_payload_fits_is_refused(ext, name, spec, words):
    with pytest.raises(UsageError, match=words):
        given_schema(json.dumps({"arrays": {name: spec}}), ext, "s.json")


def test_a_closed_schema_without_values_is_one_of_empty_payloads():
    assert given_schema('{"arrays": {"x": {"dtype": "int8", "shape": [4, 0]}}}', ".bin", "s.json")


def test_the_dtypes_that_a_format_lacks_are_those_that_its_reader_does_not_know():
    assert set(DTYPE_BYTES) - set(_SAFETENSORS.values()) == UNKNOWN_DTYPES["safetensors"]
    for dtype in set(DTYPE_BYTES) - UNKNOWN_DTYPES["npy"]:
        assert [each.dtype for each in read("npy", npy(np.zeros(1, dtype))).arrays] == [dtype]
