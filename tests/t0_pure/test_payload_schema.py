"""A lake's payload schema: what may be written into one, how a stored one is read, and what payloads it admits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_samples import bomb, npy, pt, safetensors

from stepfs.errors import CorruptError, NewerFormatError, UsageError
from stepfs.format.payload.check import PayloadCheck
from stepfs.format.payload.excerpt import Excerpt
from stepfs.format.payload.schema import (
    SCHEMA_BYTES_MAX,
    given_schema,
    schema_document,
    schema_text,
    stored_schema,
)
from stepfs.torch.table import torch_arrays

SCHEMA = {
    "version": 1,
    "format": "safetensors",
    "arrays": {
        "ids": {"dtype": "int64", "shape": ["rows", 4]},
        "labels": {"dtype": "int64", "shape": ["rows", 4]},
        "spans": {"dtype": "int32", "shape": [None, 2]},
    },
    "tokenizer": {"kind": "bytes", "identity": "bytes"},
}


def given_(schema, ext=".safetensors"):
    return given_schema(schema if isinstance(schema, str) else json.dumps(schema), ext, "s.json")


def changed(**parts):
    return {**SCHEMA, **parts}


def test_what_is_given_is_stored_and_read_back():
    schema = given_(SCHEMA)
    assert schema.document() == SCHEMA
    assert stored_schema(schema.text(), "x") == schema
    assert schema_document(schema.text()) == SCHEMA
    assert schema_text(schema.text()) == (
        "safetensors: ids int64 [rows, 4], labels int64 [rows, 4], spans int32 [?, 2]; tokenizer bytes"
    )


def test_version_and_format_follow_from_the_lake_if_they_are_left_out():
    short = {"arrays": SCHEMA["arrays"]}
    assert given_(short).document() == {"version": 1, "format": "safetensors", "arrays": SCHEMA["arrays"]}
    assert given_({}, ".tar.gz").document() == {"version": 1, "format": "gz"}
    assert given_({"arrays": {"w": {"dtype": "int8", "shape": []}}}, ".pth").format == "pt"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", r"the schema: \[\] is no map"),
        ("[" * 50_000, "nested too deeply"),
        ('{"version": 1, "version": 1}', "names 'version' twice"),
        ('{"arrays": {"a": {"dtype": "int8", "shape": []}, "a": {"dtype": "int8", "shape": []}}}', "'a' twice"),
        ('{"tokenizer": {"x": NaN}}', "NaN, which is not JSON"),
        ('{"tokenizer": {"x": 1e999}}', "text and whole numbers"),
        ('{"tokenizer": {"x": "\\ud800"}}', "text and whole numbers"),
        ('{"tokenizer": {"x": ' + "9" * 5000 + "}}", "is not JSON"),
        ({"tokenizer": {"x": []}}, "text and whole numbers"),
        ({"tokenizer": []}, "is no map"),
        ({"version": 0}, "version"),
        ({"version": True}, "version"),
        ({"version": "1"}, "version"),
        ({"dtypes": 1}, "'dtypes' means nothing; known are arrays binding format tokenizer version"),
        ({"format": "npy"}, "says the format 'npy', and the lake's files are .safetensors"),
        ({"format": 3}, "format"),
        ({"arrays": {}}, "0 of them"),
        ({"arrays": {str(n): {"dtype": "int8", "shape": []} for n in range(257)}}, "257 of them"),
        ({"arrays": {"": {"dtype": "int8", "shape": []}}}, "is no name"),
        ({"arrays": {"\ud800": {"dtype": "int8", "shape": []}}}, "is no name"),
        ({"arrays": {"a": {"dtype": "int8", "shape": [], "size": 1}}}, "'size' means nothing"),
        ({"arrays": {"a": {"dtype": "object", "shape": []}}}, 'a: dtype "object" is none of bool'),
        ({"arrays": {"a": {"dtype": ["int8"], "shape": []}}}, "a: dtype"),
        ({"arrays": {"a": {"dtype": "int8"}}}, "a: shape null is no list"),
        ({"arrays": {"a": {"dtype": "int8", "shape": [1] * 33}}}, "at most 32 dimensions"),
        ({"arrays": {"a": {"dtype": "int8", "shape": [-1]}}}, "a: dimension -1"),
        ({"arrays": {"a": {"dtype": "int8", "shape": [2.0]}}}, r"a: dimension 2\.0"),
        ({"arrays": {"a": {"dtype": "int8", "shape": [True]}}}, "a: dimension true"),
        ({"arrays": {"a": {"dtype": "int8", "shape": [2**60]}}}, "a: dimension"),
        ({"arrays": {"a": {"dtype": "int8", "shape": ["two words"]}}}, "a: dimension"),
        ({"tokenizer": {"x": "y" * SCHEMA_BYTES_MAX}}, "more than 65536 bytes"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_schema_is_one_line(schema, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        given_(schema)
    assert str(caught.value).startswith("s.json: ")
    assert len(str(caught.value)) < 300


def test_formats_without_a_table_have_no_arrays_and_those_without_names_one():
    arrays = {"a": {"dtype": "int8", "shape": []}}
    with pytest.raises(UsageError, match="nothing reads arrays out of tar files"):
        given_({"arrays": arrays}, ".tar")
    with pytest.raises(UsageError, match="one array without a name; call it 'array'"):
        given_({"arrays": arrays}, ".npy")
    with pytest.raises(UsageError, match="only one array fits"):
        given_({"arrays": {**arrays, "b": arrays["a"]}}, ".bin")
    with pytest.raises(UsageError, match="leave at most one dimension open"):
        given_({"arrays": {"a": {"dtype": "int8", "shape": [None, "n"]}}}, ".bin")


def test_a_newer_version_asks_for_a_newer_stepfs_wherever_it_stands():
    newer = json.dumps({"version": 2, "arrays": "in another form"})
    for read in (lambda: given_(newer), lambda: stored_schema(newer, "lake")):
        with pytest.raises(NewerFormatError, match=r"version 2, this stepfs knows up to 1; upgrade stepfs"):
            read()
    assert "upgrade stepfs" in schema_document(newer)["problem"]
    assert "upgrade stepfs" in schema_text(newer)


def test_a_stored_schema_may_have_keys_of_a_later_stepfs_and_no_damage():
    later = changed(colour="red", arrays={"ids": {"dtype": "int64", "shape": [1], "unit": "tokens"}}, tokenizer=None)
    assert stored_schema(json.dumps(later), "lake").document()["arrays"] == {"ids": {"dtype": "int64", "shape": [1]}}
    for damaged in (
        "",
        "null",
        '{"version": 1}',
        json.dumps(changed(arrays=3)),
        json.dumps({"format": "npy"}),
    ):
        with pytest.raises(CorruptError, match=r"^lake: "):
            stored_schema(damaged, "lake")


@given(st.text(max_size=80) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["version", "format", "arrays", "tokenizer", "dtype", "shape", "a"]), inner, max_size=4
    ),
).map(json.dumps))  # fmt: skip
def test_any_text_is_a_schema_or_a_mistake(text):
    for read, mistake in ((given_, UsageError), (lambda found: stored_schema(found, "lake"), CorruptError)):
        try:
            schema = read(text)
        except (mistake, NewerFormatError):
            continue
        assert stored_schema(schema.text(), "lake") == schema


def problem(schema, payload, ext=".safetensors"):
    return PayloadCheck(ext, given_(schema, ext), torch_arrays).problem(Excerpt.of(payload))


IDS, SPANS = np.zeros((3, 4), np.int64), np.zeros((5, 2), np.int32)


def test_a_payload_that_is_what_the_schema_says_has_no_problem():
    assert problem(SCHEMA, safetensors(ids=IDS, labels=IDS, spans=SPANS)) is None
    assert problem(SCHEMA, safetensors(spans=SPANS[:0], labels=IDS[:0], ids=IDS[:0])) is None


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"labels": IDS, "spans": SPANS}, "has no array 'ids', the lake's schema says int64 [rows, 4]; its arrays: 'labels', 'spans'"),
        ({"ids": IDS.astype(np.int32), "labels": IDS, "spans": SPANS}, "has 'ids' as int32 [3, 4], the lake's schema says int64 [rows, 4]"),
        ({"ids": IDS[:, :3], "labels": IDS, "spans": SPANS}, "has 'ids' as int64 [3, 3], the lake's schema says int64 [rows, 4]"),
        ({"ids": IDS[0], "labels": IDS, "spans": SPANS}, "has 'ids' as int64 [4], the lake's schema says int64 [rows, 4]"),
        ({"ids": IDS, "labels": IDS[:2], "spans": SPANS}, "has 'labels' as int64 [2, 4], the lake's schema says int64 [rows, 4], and rows is 3 in 'ids'"),
        ({"ids": IDS, "labels": IDS, "spans": SPANS, "more": SPANS}, "has an array 'more', int32 [5, 2], that the lake's schema does not name"),
    ],
)  # fmt: skip
def test_what_is_at_odds_is_named_with_what_the_lake_says(arrays, words):
    assert problem(SCHEMA, safetensors(**arrays)) == words


def test_other_formats_are_held_against_the_schema_too():
    one = {"arrays": {"array": {"dtype": "int32", "shape": [4, "rows", 8]}}}
    assert problem(one, npy(np.zeros((4, 2, 8), np.int32)), ".npy") is None
    assert problem(one, npy(np.zeros((4, 2, 8))), ".npy").startswith("has 'array' as float64 [4, 2, 8], the")
    assert "Python objects" in problem(one, npy(np.array([None]), allow_pickle=True), ".npy")
    two = {"arrays": {"a": {"dtype": "bfloat16", "shape": [2]}}}
    assert problem(two, pt({"a": torch.zeros(2, dtype=torch.bfloat16), "name": "x"}), ".pt") is None
    assert problem(two, pt({"a": torch.zeros(2)}), ".pt").startswith("has 'a' as float32 [2], the lake's")
    assert "GLOBAL exec " in problem(two, bomb(), ".pt")
    raw = {"arrays": {"ids": {"dtype": "uint16", "shape": ["rows", 8]}}}
    assert problem(raw, bytes(2 * 8 * 3), ".bin") is None
    assert (
        problem(raw, bytes(2 * 8 * 3 - 1), ".bin") == "has 47 bytes, the lake's schema says 'ids' is uint16 [rows, 8]"
    )
    older = '{"version": 1, "format": "bin", "arrays": {"ids": {"dtype": "uint16", "shape": [8, 0, null]}}}'
    assert PayloadCheck(".bin", stored_schema(older, "x")).problem(Excerpt.of(b"")) is not None


def test_a_schema_without_arrays_is_the_signature_of_the_format_alone():
    assert problem({}, npy(IDS), ".npy") is None
    assert "is no .npy file" in problem({}, b"raw", ".npy")
    assert problem({"tokenizer": {"kind": "bytes"}}, b"anything", ".txt") is None
