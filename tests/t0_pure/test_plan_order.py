"""The order of a source is a table of exact values: another implementation must give the same."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs_producer.plan.order import block_key, fragment_order, record_key, record_order

KEYS = {  # seed, epoch, source, fragment
    (0, 0, "code", 0): "ae33afd04bcd0ae684378efb77eaece1",
    (0, 0, "code", 1): "a07463ac4acfdc34d150e3d76073d6d5",
    (20260701, 3, "prose", 1048575): "467f43700862c7279911e98fc296bd9a",
    (2**64 - 1, 1, "grüße", 2): "e1a9f4cf3510049e685e0c8ae48bed5c",
}


@pytest.mark.parametrize("of", KEYS)
def test_keys_are_those_of_the_table(of: tuple[int, int, str, int]) -> None:
    assert block_key(*of, 0).hex() == KEYS[of]


@pytest.mark.parametrize("of", KEYS)
def test_a_key_hashes_exactly_the_bytes_that_the_design_names(of: tuple[int, int, str, int]) -> None:
    seed, epoch, source, index = of
    name = source.encode()
    data = b"stepfs-order-1\0" + struct.pack(f"<QQI{len(name)}sQ", seed, epoch, len(name), name, index)
    assert block_key(*of, 0) == hashlib.blake2b(data, digest_size=16).digest()


def test_the_first_block_has_its_fragments_key_and_the_others_one_of_their_own() -> None:
    assert block_key(0, 0, "code", 1, 0).hex() == KEYS[0, 0, "code", 1]
    assert block_key(0, 0, "code", 1, 1).hex() == "8b96546e8411a2b06ac530a5c5598aa2"
    assert record_key(1, 2, "code", 3, 4).hex() == "6b31d09b1000d67fa9157965dc8c747a"
    assert record_key(1, 2, "code", 3, 4) != block_key(1, 2, "code", 3, 4)


def test_orders_are_those_of_the_table() -> None:
    assert fragment_order(0, 0, "code", 12) == [3, 7, 8, 10, 4, 6, 9, 1, 11, 0, 5, 2]
    assert fragment_order(0, 1, "code", 12) == [11, 4, 0, 6, 9, 10, 8, 7, 2, 3, 1, 5]
    assert record_order(block_key(0, 0, "code", 0, 0), 12).tolist() == [5, 1, 7, 3, 4, 11, 8, 9, 10, 2, 6, 0]
    assert record_order(block_key(0, 0, "code", 0, 1), 12).tolist() == [2, 8, 11, 6, 1, 7, 9, 10, 0, 4, 5, 3]


def test_the_raw_bits_are_those_of_philox_4x64() -> None:
    bits = np.random.Philox(key=int.from_bytes(block_key(0, 0, "code", 0, 0), "little"), counter=0)
    assert bits.random_raw(3).tolist() == [18076632817441623157, 4134148855306210376, 13107138745905252416]


@given(st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_every_epoch_has_every_fragment_and_record_once(seed: int, count: int) -> None:
    assert sorted(fragment_order(seed, 0, "s", count)) == list(range(count))
    assert sorted(record_order(block_key(seed, 0, "s", 0, 0), count).tolist()) == list(range(count))


def test_without_shuffle_all_is_as_listed() -> None:
    assert fragment_order(0, 0, "code", 5, shuffle=False) == [0, 1, 2, 3, 4]
    assert record_order(block_key(0, 0, "code", 0, 0), 4, shuffle=False).tolist() == [0, 1, 2, 3]
