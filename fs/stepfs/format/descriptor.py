"""A commit's description of one TGB: the places and checksums of its slices, usable without opening the object.

Per slice: offset, length, CRC32C, record count; for a slice longer than one block (`BLOCK_BYTES`) also one CRC32C per
block, so that a large slice can be fetched in parts and served block by verified block. It stays packed: a lake of 10⁶
steps × 64 slices must not become 10⁸ Python objects.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format.codec import Fields
from stepfs.format.ids import BLOCK_BYTES, SLICE_BYTES_MAX, SLICES_MAX, SliceIndex
from stepfs.format.layout import Layout, stored

_SLICE: Final = struct.Struct("<QQII")
SLICE_ENTRY_BYTES: Final = _SLICE.size
_CRC: Final = struct.Struct("<I")
_KEY_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class SliceRef:
    """One slice inside its object: bytes [offset, offset + length), checksum, records."""

    offset: int
    length: int
    crc32c: int
    records: int
    blocks: tuple[int, ...]  # CRC32C of each BLOCK_BYTES block; empty for a slice of at most one block


def block_count(length: int) -> int:
    """The number of block checksums of a slice of `length` bytes (none if it fits one block)."""
    return 0 if length <= BLOCK_BYTES else -(-length // BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One TGB as a commit names it."""

    origin: int  # index into the lake's origins; 0 = this lake
    key: str
    size: int  # bytes of the whole object
    seq: int
    packed_slices: bytes
    packed_blocks: bytes

    @property
    def slices(self) -> int:
        return len(self.packed_slices) // _SLICE.size

    def length(self, index: SliceIndex) -> int:
        """Bytes of one slice, without decoding the rest."""
        length: int = _SLICE.unpack_from(self.packed_slices, index * _SLICE.size)[1]
        return length

    def slice(self, index: SliceIndex) -> SliceRef:
        """The place and checksums of slice `index`; IndexError beyond the last."""
        if not 0 <= index < self.slices:
            raise IndexError(index)
        first_block = 0
        for before in range(index if self.packed_blocks else 0):
            first_block += block_count(self.length(SliceIndex(before)))
        offset, length, crc, records = _SLICE.unpack_from(self.packed_slices, index * _SLICE.size)
        blocks = struct.unpack_from(f"<{block_count(length)}I", self.packed_blocks, first_block * _CRC.size)
        return SliceRef(offset, length, crc, records, blocks)

    @property
    def payload_bytes(self) -> int:
        return sum(entry[1] for entry in _SLICE.iter_unpack(self.packed_slices))

    @property
    def records(self) -> int:
        return sum(entry[3] for entry in _SLICE.iter_unpack(self.packed_slices))


def descriptor_bytes(lengths: Sequence[int]) -> int:
    """Bytes that slices of these lengths take in the log: `packed_slices` and `packed_blocks` together."""
    return len(lengths) * _SLICE.size + sum(map(block_count, lengths)) * _CRC.size


def pack_slices(slices: Sequence[SliceRef]) -> tuple[bytes, bytes]:
    """Slices → (packed_slices, packed_blocks)."""
    packed = b"".join(_SLICE.pack(s.offset, s.length, s.crc32c, s.records) for s in slices)
    blocks = b"".join(_CRC.pack(crc) for s in slices for crc in s.blocks)
    return packed, blocks


def check_packed(packed_slices: bytes, packed_blocks: bytes, *, size: int, what: str) -> None:
    """Refuse slices that do not fit their object, or that have too many or too few block checksums."""
    if len(packed_slices) % _SLICE.size or not 0 < len(packed_slices) // _SLICE.size <= SLICES_MAX:
        raise CorruptError(f"{what}: slice table of {len(packed_slices)} bytes")
    words = struct.unpack(f"<{len(packed_slices) // 8}Q", packed_slices)  # offset, length, the rest
    offsets, lengths = words[::3], words[1::3]
    longest = max(lengths)
    if longest > SLICE_BYTES_MAX or max(map(add, offsets, lengths)) > size:
        raise CorruptError(f"{what}: a slice lies outside its object of {size} bytes")
    blocks = sum(map(block_count, lengths)) if longest > BLOCK_BYTES else 0
    if len(packed_blocks) != blocks * _CRC.size:
        raise CorruptError(f"{what}: {len(packed_blocks)} bytes of block checksums for {blocks} blocks")


_LAYOUT: Final = Layout(
    Descriptor,
    origin=stored("origin", Fields.integer, high=255),
    key=stored("key", Fields.text, bytes_max=_KEY_BYTES_MAX),
    size=stored("size", Fields.integer),
    seq=stored("seq", Fields.integer),
    packed_slices=stored("slices", Fields.binary),
    packed_blocks=stored("blocks", Fields.binary),
)
descriptor_body: Final = _LAYOUT.body  # the map stored in commits, snapshots and index segments


def read_descriptor(fields: Fields) -> Descriptor:
    """Inverse of `descriptor_body`; `CorruptError` for anything out of bounds."""
    tgb = _LAYOUT.read(fields)
    check_packed(tgb.packed_slices, tgb.packed_blocks, size=tgb.size, what=fields.what)
    return tgb
