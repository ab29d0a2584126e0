"""The record of a mount in the fleet view: older readers and older writers take it for what they know."""

from __future__ import annotations

from stepfs.format.codec import Kind, decode
from stepfs.format.ids import Step
from stepfs.format.node import NodeRecord, decode_node, encode_node

LAKE = "a" * 32
RECORD = NodeRecord("run", "gpu-7", "/mnt/run", 12, "1.0", Step(5), Step(0), 1000, 99, interval_ms=50_000)


def test_the_interval_comes_back() -> None:
    assert decode_node(encode_node(LAKE, RECORD), "x") == (LAKE, RECORD)


def test_readers_go_by_name() -> None:
    encoded = encode_node(LAKE, RECORD)
    assert encoded[7] == 1
    assert decode(Kind.NODE, encoded, "x").integer("time") == 99  # they read by name and ignore the rest
