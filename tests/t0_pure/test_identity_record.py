"""The identity with a payload schema, and what a stepfs that knows no schemas makes of it."""

from __future__ import annotations

import msgpack
import pytest

from stepfs.errors import CorruptError
from stepfs.format.codec import HEADER_BYTES, Kind, encode
from stepfs.format.payload.schema import SCHEMA_BYTES_MAX
from stepfs.format.records import LakeIdentity, decode_lake, encode_lake

PLAIN = LakeIdentity("a" * 32, 2, ".npy", 7)
TEXT = '{"version":1,"format":"npy"}'


def body(identity):
    return msgpack.unpackb(encode_lake(identity)[HEADER_BYTES:])


def test_a_lake_without_a_schema_has_the_bytes_that_it_always_had():
    assert body(PLAIN) == {"lake": "a" * 32, "slices": 2, "ext": ".npy", "created": 7}


def test_a_schema_is_one_more_key_which_older_readers_ignore():
    described = LakeIdentity("a" * 32, 2, ".npy", 7, payload_schema=TEXT)
    assert decode_lake(encode_lake(described), "x") == described
    assert body(described) == {**body(PLAIN), "payload_schema": TEXT}
    # What a reader of before does with a key that it does not know is what this one does.
    later = encode(Kind.LAKE, {**body(described), "a_key_of_tomorrow": [1, {"x": b"y"}]})
    assert decode_lake(later, "x") == described


@pytest.mark.parametrize("value", [7, b"{}", None, ["x"], "x" * (SCHEMA_BYTES_MAX + 1)])
def test_another_type_or_size_is_corrupt(value):
    with pytest.raises(CorruptError, match="payload_schema"):
        decode_lake(encode(Kind.LAKE, {**body(PLAIN), "payload_schema": value}), "x")


def test_a_text_that_is_no_schema_is_still_a_lake_that_can_be_mounted():
    odd = LakeIdentity("a" * 32, 2, ".npy", 7, payload_schema="no schema at all")
    assert decode_lake(encode_lake(odd), "x") == odd
