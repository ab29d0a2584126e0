"""`.pt` files beside dense tensors: what stepfs does not follow is named, never skipped; nothing is called."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import Counter, OrderedDict

import pytest
import torch
from payload_samples import pt, zipped

from stepfs.format.payload.arrays import read_arrays
from stepfs.format.payload.check import PayloadCheck
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import given_schema
from stepfs.format.payload.values import values_bytes

CHECK = PayloadCheck(
    ".pt", given_schema('{"arrays": {"x": {"dtype": "float32", "shape": [2]}}}', ".pt", "s.json")
)


def read(payload):
    return read_arrays("pt", Excerpt.of(payload))


def shown(value):
    return [(array.name, array.dtype, array.shape) for array in read(pt(value)).arrays]


def problem(value, **options):
    return CHECK.problem(Excerpt.of(pt(value, **options)))


@pytest.fixture(scope="module")
def sparse():
    """Of each layout, by its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "in beta state"
        rows = torch.eye(4)
        return {
            "sparse_coo": rows.to_sparse(),
            "sparse_csr": rows.to_sparse_csr(),
            "sparse_csc": rows.to_sparse_csc(),
            "sparse_bsr": rows.to_sparse_bsr((2, 2)),
            "sparse_bsc": rows.to_sparse_bsc((2, 2)),
        }


def test_a_sparse_tensor_is_an_array_that_no_schema_admits(sparse):
    for layout, tensor in sparse.items():
        assert shown({"x": tensor}) == [("x", f"{layout} float32", (4, 4))]
        assert shown(tensor) == [("array", f"{layout} float32", (4, 4))]
        assert problem({"x": torch.ones(2), "y": tensor}) == (
            f"has an array 'y', {layout} float32 [4, 4], that the lake's schema does not name"
        )
        assert f"has 'x' as {layout} float32 [4, 4]" in problem({"x": tensor})
        [array] = read(pt({"x": tensor})).arrays
        assert values_bytes(array, 8) is None


class Odd:
    """Saved as a call of any function."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize(
    "function",
    [torch._utils._rebuild_nested_tensor, torch._utils._rebuild_wrapper_subclass, torch._utils._rebuild_device_tensor_from_cpu_tensor, torch.serialization.load],
)  # fmt: skip
def test_a_call_that_stepfs_does_not_follow_is_named(function):
    payload = zipped(pickle.dumps({"x": Odd(function, 2)}, 2))
    with pytest.raises(
        UnreadablePayloadError, match=f"calls torch.*{function.__name__}, which stepfs does not follow"
    ):
        read(payload)


def test_a_call_whose_value_is_thrown_away_is_named_too():
    thrown = b"\x80\x02" + pickle.dumps(Odd(torch.serialization.load, 2), 2)[2:-1] + b"0}."
    with pytest.raises(UnreadablePayloadError, match=r"calls torch\.serialization\.load"):
        read(zipped(thrown))


def test_no_tensor_is_skipped_wherever_it_is():
    x, more = torch.ones(2), torch.zeros(3)
    tagged, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tagged.more, parameter.more = more, more
    ordered = OrderedDict(x=x)
    vars(ordered)["more"] = more
    values = {
        "an attribute": {"x": tagged},
        "an attribute of a parameter": {"x": parameter},
        "an attribute of the map": ordered,
        "keys that look alike": {"x": x, 1: more, "1": more},
        "dotted keys": {"x": x, "a.b": more, "a": {"b": more}},
        "dotted keys that the schema has": {"x": x, "": {"x": more}},
        "keys of one type": {"x": x, (1,): more, (2,): more},
        "keys of bytes": {"x": x, b"a": more, b"b": more},
        "a storage": {"x": x, "more": more.untyped_storage()},
        "without values": {"x": x, "more": more.to("meta")},
        "a size": {"x": x, "more": [torch.Size([1]), more]},
    }
    assert problem({"x": x}) is None
    assert {where: problem(value) for where, value in values.items() if problem(value) is None} == {}
    assert shown({(1,): more, (2,): more}) == [("(tuple 0)", "float32", (3,)), ("(tuple 1)", "float32", (3,))]
    assert shown({"x": tagged}) == [("x", "float32", (2,)), ("x.more", "float32", (3,))]
    assert shown({"m": more.to("meta")}) == [("m", "meta float32", (3,))]
    assert "two arrays 'a.b'" in problem(values["dotted keys"])


PLAIN = {
    "raw": b"jpeg\xff\x00",
    "buffer": bytearray(b"abc"),
    "nothing": bytearray(),
    "number": 1 + 2j,
    "numbers": [1j, b"ab", {3}],
    "set": {1},
    "counts": Counter("aab"),
    "size": torch.Size([2, 3]),
    "device": torch.device("cuda", 0),
    "dtype": torch.bfloat16,
    "empty": set(),
    b"key": 1.5,
    2.5: None,
}


def test_plain_values_that_torch_loads_are_facts_beside_the_arrays():
    payload = pt({"x": torch.ones(2), **PLAIN})
    torch.load(io.BytesIO(payload), weights_only=True)
    assert CHECK.problem(Excerpt.of(payload)) is None
    assert read(payload).facts == {
        "raw": "6 bytes",
        "buffer": "3 bytes",
        "nothing": "0 bytes",
        "number": "(1+2j)",
        "numbers.0": "1j",
        "numbers.1": "2 bytes",
        "numbers.2": [3],
        "set": [1],
        "counts.a": 2,
        "counts.b": 1,
        "size": [2, 3],
        "device": "cuda:0",
        "dtype": "torch.bfloat16",
        "empty": [],
        "(Bytes 12)": 1.5,
        "2.5": None,
    }
    assert read(pt({"x": [b"a", 1j, 2]})).facts == {"x": ["1 bytes", "1j", 2]}


@pytest.mark.parametrize(
    "value",
    [{"x": bytearray, "y": (1 << 40,)}, {"x": complex, "y": ("1",)}, {"x": set, "y": ("ab",)}],
)
def test_a_call_with_other_arguments_is_refused_and_makes_nothing(value):
    with pytest.raises(UnreadablePayloadError):
        read(zipped(pickle.dumps({"a": Odd(value["x"], *value["y"])}, 2)))


@pytest.mark.parametrize("name", ["bytes", "getattr", "eval", "open"])
def test_other_builtins_stay_refused(name):
    with pytest.raises(
        UnreadablePayloadError, match=f"names __builtin__.{name}, which unpickling would import"
    ):
        read(zipped(f"\x80\x02c__builtin__\n{name}\n.".encode("latin-1")))


def test_long_text_that_is_made_bytes_many_times_takes_no_memory():
    text = b"X\x00\x00\x08\x00" + b"a" * (512 << 10) + b"q\x00"
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86Ra"
    [first, *_] = [read(zipped(b"\x80\x02" + text + b"0]" + call * 10_000 + b"."))]
    assert first.facts[""][:2] == ["524288 bytes"] * 2


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


def test_quantized_tensors_are_arrays_that_no_schema_admits():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated
        rows = torch.ones(2, 2)
        tensors = {
            "a": torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8),
            "b": torch.quantize_per_channel(rows, torch.ones(2), torch.zeros(2), 0, torch.quint8),
        }
        payload = pt(tensors)
    found = [(array.name, array.dtype, array.shape) for array in read(payload).arrays]
    assert found == [("a", "qint8", (2, 2)), ("b", "quint8", (2, 2))]


def persistent(kind="Float", count=2, more=""):
    """The pickle of {"x": a tensor}, by hand: its storage, and how the tensor is made of it."""
    storage = f"(X\x07\0\0\0storagectorch\n{kind}Storage\nX\x01\0\0\x000X\x03\0\0\0cpuK{chr(count)}tQ"
    made = f"ctorch._utils\n_rebuild_tensor_v2\n({storage}K\0K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)R{more}tR"
    return f"\x80\x02}}X\x01\0\0\0x{made}s.".encode("latin-1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kind": "Flat"}, "describes a storage in a way"),
        ({"count": 3}, "has other bytes for the tensor 'x'"),
        ({"count": 1}, "has other bytes for the tensor 'x'"),
        ({"more": "NNN"}, "describes a tensor in a way"),
    ],
)
def test_a_description_that_torch_cannot_follow_is_refused(changes, reason):
    members = {"data/0": bytes(8), "version": b"3", "byteorder": b"little"}
    payload = zipped(persistent(**changes), **members)
    if reason is None:
        assert torch.load(io.BytesIO(payload), weights_only=True)["x"].shape == (2,)
        assert CHECK.problem(Excerpt.of(payload)) is None
        return
    with pytest.raises((RuntimeError, TypeError, pickle.UnpicklingError)):
        torch.load(io.BytesIO(payload), weights_only=True)
    with pytest.raises(UnreadablePayloadError, match=reason):
        read(payload)
