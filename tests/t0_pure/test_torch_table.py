"""`.pt` files by torch's own unpickler: what no schema can name is refused, never skipped; no code of a file runs."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_samples import bomb, pt, zipped

from stepfs.errors import MissingPackageError
from stepfs.format.payload.check import PayloadCheck
from stepfs.format.payload.excerpt import HEAD_BYTES_MAX, TAIL_BYTES_MAX, Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import given_schema
from stepfs.format.payload.values import decode, member_values_at, values_bytes
from stepfs.torch.need import need_torch
from stepfs.torch.table import torch_arrays

SCHEMA = '{"arrays": {"x": {"dtype": "float32", "shape": [2]}}}'
CHECK = PayloadCheck(".pt", given_schema(SCHEMA, ".pt", "s.json"), torch_arrays)


def read(payload):
    return torch_arrays(Excerpt.of(payload))


def shown(value):
    return [(array.name, array.dtype, array.shape) for array in read(pt(value)).arrays]


def problem(value, **options):
    return CHECK.problem(Excerpt.of(pt(value, **options)))


def test_names_dtypes_and_shapes():
    rows = torch.arange(24).reshape(4, 6)
    value = {
        "ids": rows, "half": rows.bfloat16(), "eighth": rows.float().to(torch.float8_e4m3fn), "view": rows[1:3],
        "turned": rows.t(), "deep": {"list": [rows.int(), 7]}, "parameter": torch.nn.Parameter(rows.float()),
        "none": torch.zeros(0, 5), "scalar": torch.tensor(True), "sources": ["a", "b"], "sequence_length": 6,
    }  # fmt: skip
    found = read(pt(value))
    assert {array.name: (array.dtype, array.shape, array.strided) for array in found.arrays} == {
        "ids": ("int64", (4, 6), False), "half": ("bfloat16", (4, 6), False),
        "eighth": ("float8_e4m3fn", (4, 6), False), "view": ("int64", (2, 6), False),
        "turned": ("int64", (6, 4), True), "deep.list.0": ("int32", (4, 6), False),
        "parameter": ("float32", (4, 6), False), "none": ("float32", (0, 5), False), "scalar": ("bool", (), False),
    }  # fmt: skip
    assert found.facts == {"sources": ["a", "b"], "sequence_length": 6, "deep.list.1": 7}
    assert shown(rows) == [("array", "int64", (4, 6))]
    model = torch.nn.Linear(3, 2).state_dict()
    assert shown(model) == [("weight", "float32", (2, 3)), ("bias", "float32", (2,))]


def test_values_are_found_in_a_payload_of_any_length():
    """Also those whose local header an excerpt does not have."""
    long = torch.full((HEAD_BYTES_MAX,), 3, dtype=torch.int32)
    payload = pt({"a": long, "none": torch.zeros(0), "b": long + 1, "c": long[5:] + 2, "tail": torch.arange(5)})
    first = {}
    for array in read(payload).arrays:
        if array.member_at is not None:
            at = array.member_at + member_values_at(payload[array.member_at :]) + array.offset
            first[array.name] = decode(array.dtype, payload[at : at + values_bytes(array, 2)]).tolist()
    assert first == {"a": [3, 3], "b": [4, 4], "c": [5, 5], "tail": [0, 1]}


def test_no_tensor_is_skipped_wherever_it_is():
    x, more = torch.ones(2), torch.zeros(3)
    tagged, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tagged.more, parameter.more = more, more
    ordered = OrderedDict(x=x)
    vars(ordered)["more"] = more
    values = {
        "an attribute": {"x": tagged}, "an attribute of a parameter": {"x": parameter},
        "an attribute of the map": ordered, "keys that look alike": {"x": x, 1: more, "1": more},
        "dotted keys": {"x": x, "a.b": more, "a": {"b": more}},
        "dotted keys that the schema has": {"x": x, "": {"x": more}},
        "keys of one type": {"x": x, (1,): more, (2,): more}, "keys of bytes": {"x": x, b"a": more, b"b": more},
        "a storage": {"x": x, "more": more.untyped_storage()}, "without values": {"x": x, "more": more.to("meta")},
        "a size": {"x": x, "more": [torch.Size([1]), more]},
    }  # fmt: skip
    assert problem({"x": x}) is None
    assert {where: problem(value) for where, value in values.items() if problem(value) is None} == {}
    assert shown({(1,): more, (2,): more}) == [("(tuple 0)", "float32", (3,)), ("(tuple 1)", "float32", (3,))]
    assert "two arrays 'a.b'" in problem(values["dotted keys"])


@pytest.fixture(scope="module")
def rare():
    """Tensors that no schema can name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "in beta state", "deprecated"
        rows = torch.eye(4)
        return {
            "sparse": rows.to_sparse(),
            "sparse rows": rows.to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8),
            "no values": rows.to("meta"),
        }


def test_other_tensors_are_refused(rare):
    for what, tensor in rare.items():
        for value in ({"x": tensor}, tensor, {"x": torch.ones(2), "y": tensor}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert "tensor" in problem(value), what


def test_plain_values_are_facts_beside_the_arrays():
    plain = {
        "raw": b"jpeg\xff\x00", "buffer": bytearray(b"abc"), "number": 1 + 2j, "set": {1}, "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16, "list": [1, [2]], 2.5: None,
    }  # fmt: skip
    payload = pt({"x": torch.ones(2), **plain})
    assert CHECK.problem(Excerpt.of(payload)) is None
    assert read(payload).facts == {
        "raw": "6 bytes", "buffer": "3 bytes", "number": "a complex", "set": "a set", "size": [2, 3],
        "dtype": "a dtype", "list.0": 1, "list.1": [2], "2.5": None,
    }  # fmt: skip


def test_a_pickle_that_would_run_a_program_is_refused_by_its_name():
    with pytest.raises(UnreadablePayloadError, match="Unsupported global: GLOBAL exec"):
        read(bomb())


@pytest.mark.parametrize("name", ["bytes", "getattr", "eval", "open"])
def test_other_builtins_are_refused(name):
    with pytest.raises(UnreadablePayloadError, match=f"Unsupported global: GLOBAL {name} "):
        read(zipped(f"\x80\x02c__builtin__\n{name}\n.".encode("latin-1")))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (zipped(b""), "no file of tensors and plain values by torch.save"),
        (zipped(pickle.dumps({}, 2), compression=zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(b"\x80\x02r\xff\xff\xff\x7f."), "IndexError"),
        (zipped(pickle.dumps("a" * (HEAD_BYTES_MAX + TAIL_BYTES_MAX), 2), more=bytes(HEAD_BYTES_MAX)), "does not lie in"),
        (zipped(pickle.dumps({}, 2))[:-5], "not a zip file"),
        (zipped(pickle.dumps({}, 2), **{"constants.pkl": b"K\0."}), "TorchScript"),
        (b"PK\x05\x06" + bytes(18), "a zip without one data.pkl"),
    ],
)  # fmt: skip
def test_other_zips_are_refused_in_words(payload, reason):
    with pytest.raises(UnreadablePayloadError, match=reason):
        read(payload)


def test_a_list_that_holds_itself_many_times_is_not_walked_for_ever():
    doubled = b"\x80\x02](NNe" + b"q\x00"  # each round: a list of the list before, twice
    for number in range(40):
        doubled += b"](h" + bytes([number]) + b"h" + bytes([number]) + b"eq" + bytes([number + 1])
    with pytest.raises(UnreadablePayloadError, match="more values, or deeper ones"):
        read(zipped(doubled + b"."))


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4), st.integers(0, 3000))
def test_flipped_and_cut_bytes_raise_nothing_else(changes, cut):
    payload = bytearray(pt({"a": torch.arange(6).reshape(2, 3), "n": 1}))
    for place, value in changes:
        payload[place % len(payload)] = value
    with suppress(UnreadablePayloadError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another version of pickle
        read(bytes(payload[: max(0, len(payload) - cut)] if cut % 3 else payload))


def test_values_of_conjugated_and_negated_views_are_not_shown():
    number = torch.tensor([1 + 2j, 3 + 4j])
    value = {
        "plain": number,
        "conj": number.conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "resolved": number.conj().resolve_conj(),
    }
    found = {array.name: values_bytes(array, 8) for array in read(pt(value)).arrays}
    assert found == {"plain": 16, "conj": None, "neg": None, "resolved": 16}


def persistent(kind="Float", count=2, more=""):
    """The pickle of {"x": a tensor}, by hand: its storage, and how the tensor is made of it."""
    storage = f"(X\x07\0\0\0storagectorch\n{kind}Storage\nX\x01\0\0\x000X\x03\0\0\0cpuK{chr(count)}tQ"
    made = (
        f"ctorch._utils\n_rebuild_tensor_v2\n({storage}K\0K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)R{more}tR"
    )
    return f"\x80\x02}}X\x01\0\0\0x{made}s.".encode("latin-1")


@pytest.mark.parametrize(
    ("changes", "reason"), [
        ({}, None), ({"kind": "Flat"}, "FlatStorage"),
        ({"count": 3}, "has other bytes for the tensor 'x'"), ({"more": "NNN"}, "TypeError"),
    ],
)  # fmt: skip
def test_a_description_that_does_not_fit_the_values_is_refused(changes, reason):
    payload = zipped(persistent(**changes), **{"data/0": bytes(8)})
    if reason is None:
        assert torch.load(io.BytesIO(payload), weights_only=True)["x"].shape == (2,)
        assert CHECK.problem(Excerpt.of(payload)) is None
        return
    with pytest.raises(UnreadablePayloadError, match=reason):
        read(payload)


def test_an_older_torch_is_refused_for_files_of_others_only(monkeypatch):
    for installed in ("2.10.0+cu124", "1.13", "unknown"):
        monkeypatch.setattr("stepfs.torch.need.version", lambda _, said=installed: said)
        need_torch("this")
        with pytest.raises(MissingPackageError, match=rf"torch 2\.11 or newer.*{re.escape(installed)}"):
            need_torch("this", for_foreign_files=True)
    monkeypatch.setattr("stepfs.torch.need.version", lambda _: "2.11.0")
    need_torch("this", for_foreign_files=True)
