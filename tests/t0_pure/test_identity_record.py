"""Records of other versions: the identity, and that of a mount, as older readers and writers
take them.
"""

from __future__ import annotations

import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError
from stepfs.format.codec import HEADER_BYTES, Kind, decode, encode
from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.node import NodeRecord, encode_node
from stepfs.format.records import LakeIdentity, decode_lake, encode_lake

PLAIN = LakeIdentity("a" * 32, Grid(2), ".npy", 7)


def body(identity):
    return msgpack.unpackb(encode_lake(identity)[HEADER_BYTES:])


def test_what_a_lake_without_promises_stores():
    assert body(PLAIN) == {
        "lake": "a" * 32, "slices": 2, "grid": {"ranks": 2, "micro": 1, "cp": 1, "files": [""]}, "ext": ".npy", "created": 7,
    }  # fmt: skip


def test_a_promise_is_one_more_key_and_readers_ignore_those_that_they_do_not_know():
    promised = LakeIdentity("a" * 32, Grid(2), ".npy", 7, check_payload=True)
    assert decode_lake(encode_lake(promised), "x") == promised
    assert body(promised) == {**body(PLAIN), "check_payload": True}
    later = encode(Kind.LAKE, {**body(promised), "a_key_of_tomorrow": [1, {"x": b"y"}]})
    assert decode_lake(later, "x") == promised


@given(
    st.builds(
        Grid,
        st.integers(1, 8),
        st.integers(1, 8),
        st.integers(1, 8),
        st.lists(st.from_regex(r"([a-z][a-z0-9_]{0,31})?", fullmatch=True), min_size=1, max_size=4, unique=True).map(
            tuple
        ),
    )
)
def test_a_grid_survives_its_journey_and_numbers_each_slice_once(grid):
    identity = LakeIdentity("a" * 32, grid, ".npy", 7)
    assert decode_lake(encode_lake(identity), "x") == identity
    places = list(itertools.product(range(grid.units), range(grid.cp), range(len(grid.files))))
    assert [grid.slice_of(*place) for place in places] == list(range(grid.slices))
    assert [grid.place_of(index) for index in map(SliceIndex, range(grid.slices))] == places


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 3}, {"micro": 2}, {"cp": 2}, {"files": ["", "b"]}, {"files": []}, {"ranks": 0}, {"ranks": 1 << 15},
        {"ranks": 1, "files": ["", ""]}, {"files": ["A"]}, {"files": ["a/b"]}, {"files": ["a\n"]}, {"cp": True},
        {"micro": None},
    ],
)  # fmt: skip
def test_a_grid_that_contradicts_the_slices_or_is_none_is_corrupt(change):
    grid = {**body(PLAIN)["grid"], **change}
    with pytest.raises(CorruptError, match="grid"):
        decode_lake(encode(Kind.LAKE, {**body(PLAIN), "grid": grid}), "x")


def test_a_lake_without_a_grid_is_corrupt():
    without = {name: value for name, value in body(PLAIN).items() if name != "grid"}
    with pytest.raises(CorruptError, match="grid"):
        decode_lake(encode(Kind.LAKE, without), "x")


LAKE = "a" * 32
RECORD = NodeRecord("run", "gpu-7", "/mnt/run", 12, "1.0", Step(5), Step(0), 1000, 99)


def test_readers_go_by_name() -> None:
    encoded = encode_node(LAKE, RECORD)
    assert encoded[7] == 1
    assert decode(Kind.NODE, encoded, "x").integer("time") == 99  # they read by name and ignore the rest
