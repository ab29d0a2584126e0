"""The TGB object: every slice of one global step, immutable, and the descriptor by which a commit names it.

Layout: FORMAT.md. The writer never joins payloads: the image is a list of buffers, sent without a copy.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import add
from typing import Final

from crc32c import crc32c

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.codec import FORMAT_VERSION, Fields, Kind, Later, Layout, decode, encode, signed, stored
from stepfs.format.ids import BLOCK_BYTES, NOTE_BYTES_MAX, SLICE_BYTES_MAX, SLICES_MAX, Epoch, SliceIndex

_SLICE: Final = struct.Struct("<QQII")
SLICE_ENTRY_BYTES: Final = _SLICE.size
_CRC: Final = struct.Struct("<I")
_KEY_BYTES_MAX: Final = 1024
_OF_ENTRY: Final = (
    "lake",
    "digest",
    "step",
    "version",
    "time",
    "producer",
    "epoch",
)  # beside it, in snapshots and segments

Buffer = bytes | bytearray | memoryview
ALIGNMENT_BYTES: Final = 64
FOOTER_BYTES: Final = 24
_MAGIC: Final = b"stepfs-tgb\n"
_FOOT: Final = b"tgb-foot"
_COVERED: Final = (_MAGIC + bytes([FORMAT_VERSION])).ljust(ALIGNMENT_BYTES - 4, b"\0")
HEADER: Final = _COVERED + struct.pack("<I", crc32c(_COVERED))
_FOOTER = struct.Struct("<QI")
_POLYNOMIAL: Final = 0x82F63B78  # of CRC32C, reflected: the highest bit is x^0
_ONE: Final = 1 << 31
_X8: Final = 1 << 23
_ZEROS: Final = bytes(ALIGNMENT_BYTES)
_AGAIN_BYTES_MAX: Final = 512 << 10  # in the CPU's cache a second pass over so much is cheaper than `joined`


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
    note: bytes = b""  # msgpack of the producer's words about the step; b"" if it gave none
    later: Later = field(default=(), hash=False)

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
    (*_OF_ENTRY, "note"),
    origin=stored("origin", Fields.integer, high=255),
    key=stored("key", Fields.text, bytes_max=_KEY_BYTES_MAX),
    size=stored("size", Fields.integer),
    seq=stored("seq", Fields.integer),
    packed_slices=stored("slices", Fields.binary),
    packed_blocks=stored("blocks", Fields.binary),
)


def descriptor_body(tgb: Descriptor) -> dict[str, object]:
    """The map stored in commits, snapshots and index segments."""
    body = _LAYOUT.body(tgb)
    return {**body, "note": tgb.note} if tgb.note else body


def read_descriptor(fields: Fields) -> Descriptor:
    """Inverse of `descriptor_body`; `CorruptError` for anything out of bounds."""
    tgb = _LAYOUT.read(fields)
    if "note" in fields:
        tgb = replace(tgb, note=fields.binary("note", size_max=NOTE_BYTES_MAX))
    check_packed(tgb.packed_slices, tgb.packed_blocks, size=tgb.size, what=fields.what)
    return tgb


@dataclass(frozen=True, slots=True)
class TgbIndex:
    """The object's own record of its writer and the places of its slices."""

    lake_id: str
    producer_id: str
    epoch: Epoch
    seq: int
    packed_slices: bytes
    packed_blocks: bytes


_INDEX: Final = Layout(
    TgbIndex,
    lake_id=stored("lake", Fields.text),
    producer_id=stored("producer", Fields.text),
    epoch=stored("epoch", Fields.integer, low=1),
    seq=stored("seq", Fields.integer),
    packed_slices=stored("slices", Fields.binary),
    packed_blocks=stored("blocks", Fields.binary),
)


@dataclass(frozen=True, slots=True)
class TgbImage:
    """An object ready to be sent: `b"".join(parts)` would be its bytes, `crc32c` is theirs."""

    parts: tuple[Buffer, ...]
    size: int
    crc32c: int
    packed_slices: bytes
    packed_blocks: bytes


def checksum_slice(payload: memoryview) -> tuple[int, tuple[int, ...]]:
    """CRC32C of a slice, and of each of its blocks when it has more than one."""
    if not block_count(len(payload)):
        return crc32c(payload), ()
    whole = 0
    blocks = []
    for start in range(0, len(payload), BLOCK_BYTES):
        block = payload[start : start + BLOCK_BYTES]
        blocks.append(crc32c(block))
        whole = joined(whole, blocks[-1], len(block))
    return whole, tuple(blocks)


def build(
    *, lake_id: str, producer_id: str, epoch: Epoch, seq: int, payloads: Sequence[Buffer], records: Sequence[int]
) -> TgbImage:
    """Lay out and checksum one TGB. CPU-bound (a pass over every payload): call it in a worker thread."""
    assert len(payloads) == len(records) > 0
    parts: list[Buffer] = [HEADER]
    offset = len(HEADER)
    whole = crc32c(HEADER)
    slices = []
    for payload, count in zip(payloads, records, strict=True):
        view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
        crc, blocks = checksum_slice(view)
        slices.append(SliceRef(offset, len(view), crc, count, blocks))
        parts.append(view)
        whole = joined(whole, crc, len(view)) if len(view) > _AGAIN_BYTES_MAX else crc32c(view, whole)
        padding = -len(view) % ALIGNMENT_BYTES
        if padding:
            parts.append(_ZEROS[:padding])
            whole = crc32c(_ZEROS[:padding], whole)
        offset += len(view) + padding
    packed_slices, packed_blocks = pack_slices(slices)
    own = TgbIndex(lake_id, producer_id, epoch, seq, packed_slices, packed_blocks)
    index = encode(Kind.TGB_INDEX, signed(_INDEX.body(own)))
    place = _FOOTER.pack(offset, len(index))
    end = b"".join([index, place, struct.pack("<I", crc32c(place)), _FOOT])
    return TgbImage((*parts, end), offset + len(end), crc32c(end, whole), packed_slices, packed_blocks)


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of A + B from those of A and of B: no second pass over their bytes.

    Mark Adler's way (zlib's `crc32_combine`, with x^n instead of matrices): a CRC is a polynomial over GF(2), and n zero
    bytes behind it multiply it by x^8n. That takes as long in Python as the CRC of 128 KiB that are in a cache.
    """
    return _product(_zeros(second_bytes), first) ^ second


@lru_cache(maxsize=64)
def _zeros(count: int) -> int:
    """x^(8 · count)."""
    power, square = _ONE, _X8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(left: int, right: int) -> int:
    found, bit = 0, _ONE
    while bit:
        if left & bit:
            found ^= right
        bit >>= 1
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return found


def read_header(header: bytes, what: str) -> None:
    """Refuse an object that is no TGB, or of a newer format. `header` is the object's first 64 bytes."""
    if not header.startswith(_MAGIC) or len(header) != ALIGNMENT_BYTES:
        raise CorruptError(f"{what}: not a TGB object")
    if header == HEADER:
        return
    (checksum,) = struct.unpack("<I", header[-4:])
    if crc32c(header[:-4]) != checksum:
        raise CorruptError(f"{what}: the header of the TGB is damaged")
    raise NewerFormatError(f"{what}: TGB of format {header[len(_MAGIC)]}; upgrade stepfs")


def read_footer(footer: bytes, *, size: int, what: str) -> tuple[int, int]:
    """Last `FOOTER_BYTES` of the object → (index offset, index length)."""
    if len(footer) != FOOTER_BYTES or footer[-len(_FOOT) :] != _FOOT:
        raise CorruptError(f"{what}: no TGB footer; the object is truncated")
    place = footer[: _FOOTER.size]
    (checksum,) = struct.unpack_from("<I", footer, _FOOTER.size)
    if crc32c(place) != checksum:
        raise CorruptError(f"{what}: TGB footer checksum mismatch")
    offset, length = _FOOTER.unpack(place)
    if offset < ALIGNMENT_BYTES or offset + length + FOOTER_BYTES != size:
        raise CorruptError(f"{what}: TGB index [{offset}, +{length}) does not fit an object of {size} bytes")
    return offset, length


def read_index(data: bytes, *, size: int, what: str) -> TgbIndex:
    index = _INDEX.read(decode(Kind.TGB_INDEX, data, what))
    check_packed(index.packed_slices, index.packed_blocks, size=size, what=what)
    return index
