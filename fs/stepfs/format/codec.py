"""The envelope of every small object, and bounded decoding of its contents.

    offset 0   6 bytes   magic "stepfs"
           6   u8        kind (`Kind`)
           7   u8        format version
           8   u32 LE    body length
          12   u32 LE    CRC32C of the first 12 bytes and the body
          16   …         body: one msgpack map with string keys

The checksum is verified before msgpack sees a byte. Unknown map keys are ignored within a format version; an
unknown kind or another version stops the reader (FORMAT.md, "The unknown"). Anything malformed is
`CorruptError`, never another exception, never an allocation larger than a small multiple of the input (`shape.py`).

A version that this reader does not know is believed only if the checksum holds: otherwise a flipped bit would ask for
an upgrade.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgpack
from crc32c import crc32c

from stepfs.errors import CorruptError, NewerFormatError, RefusedError, StepfsError
from stepfs.format.ids import ID_BYTES_MAX, INTEGER_MAX, TOTAL_MAX
from stepfs.format.shape import check_shape

MAGIC: Final = b"stepfs"
FORMAT_VERSION: Final = 1
OBJECT_BYTES_MAX: Final = 256 << 20
_COVERED = struct.Struct("<6sBBI")  # the part of the header that the checksum covers
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES: Final = _COVERED.size + _CHECKSUM.size
_CONTAINER_ITEMS_MAX: Final = 1 << 14

T = TypeVar("T")
Value = None | bool | int | float | str | bytes | list["Value"] | dict["Value", "Value"]


class Kind(enum.IntEnum):
    """The kind of an enveloped object; stored, so numbers never change meaning."""

    LAKE = 1
    COMMIT = 2
    SNAPSHOT = 3
    STEP_ENTRY = 4
    CONTROL = 5
    TGB_INDEX = 6
    NODE = 7


def encode(kind: Kind, body: Mapping[str, object]) -> bytes:
    """Envelope one map. `RefusedError` if it is larger than readers accept."""
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    if len(packed) > OBJECT_BYTES_MAX:  # no reader would take it
        raise RefusedError(
            f"a {kind.name.lower()} of {len(packed)} bytes is not written; at most {OBJECT_BYTES_MAX} can be read"
        )
    covered = _COVERED.pack(MAGIC, kind, FORMAT_VERSION, len(packed))
    return covered + _CHECKSUM.pack(crc32c(packed, crc32c(covered))) + packed


def readable(kind: Kind, data: bytes, value: T, decoder: Callable[[bytes, str], T]) -> bytes:
    """`data`, if every reader decodes `value` from it; else `RefusedError`.

    Every encoder ends with this check: a written object can never be corrected, and one object that readers refuse
    stops all of them.
    """
    name = kind.name.lower()
    try:
        found = decoder(data, f"a new {name}")
    except StepfsError as error:
        raise RefusedError(f"a {name} that no reader would accept is not written: {error}") from error
    if found != value:
        raise RefusedError(f"a {name} that readers would misread is not written; report this")
    return data


def decode(kind: Kind, data: bytes | memoryview, what: str) -> Fields:
    """Open an envelope of the expected kind. `what` names the object in errors (its key)."""
    length = envelope_bytes(data, what) - HEADER_BYTES
    magic, got_kind, version, _ = _COVERED.unpack_from(data)
    if magic != MAGIC:
        raise CorruptError(f"{what}: not a stepfs object (magic {magic!r})")
    body = memoryview(data)[HEADER_BYTES:]
    if len(body) != length:
        raise CorruptError(f"{what}: truncated, {len(body)} of {length} body bytes")
    (checksum,) = _CHECKSUM.unpack_from(data, _COVERED.size)
    if crc32c(body, crc32c(memoryview(data)[: _COVERED.size])) != checksum:
        raise CorruptError(f"{what}: checksum mismatch")
    if version != FORMAT_VERSION:
        raise NewerFormatError(
            f"{what}: written in format {version}, this stepfs reads format {FORMAT_VERSION}; upgrade stepfs"
        )
    if got_kind != kind:
        raise CorruptError(f"{what}: is a stepfs object of kind {got_kind}, expected {kind.name} ({kind.value})")
    return Fields(unpack(body, what), what)


def envelope_bytes(data: bytes | memoryview, what: str) -> int:
    """The length of the envelope at the beginning of `data`; `decode` verifies its checksum."""
    if len(data) < HEADER_BYTES:
        raise CorruptError(f"{what}: {len(data)} bytes is too short for a stepfs object")
    length: int = _COVERED.unpack_from(data)[3]
    return HEADER_BYTES + length


def unpack(body: bytes | memoryview, what: str) -> Value:
    """Msgpack → value, bounded in depth by msgpack's own stack, in width here, and in memory by `check_shape`."""
    check_shape(body, what)
    try:
        value: Value = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=False,
            max_array_len=min(len(body), _CONTAINER_ITEMS_MAX),
            max_map_len=min(len(body), _CONTAINER_ITEMS_MAX),
        )
    except Exception as error:
        # msgpack raises many types here (ValueError, StackError, ExtraData, TypeError for unhashable keys …).
        raise CorruptError(f"{what}: malformed msgpack ({type(error).__name__}: {error})") from error
    return value


class Fields:
    """A decoded map, read field by field, each with its type and bound."""

    __slots__ = ("_map", "what")

    def __init__(self, value: Value, what: str) -> None:
        if not isinstance(value, dict):
            raise CorruptError(f"{what}: expected a map, found {type(value).__name__}")
        self._map = value
        self.what = what

    def __contains__(self, name: str) -> bool:
        return name in self._map

    def integer(self, name: str, *, low: int = 0, high: int = INTEGER_MAX) -> int:
        value = self._map.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad(name, f"an integer in [{low}, {high}]")
        return value

    def total(self, name: str) -> int:
        """A running total of bytes or records."""
        return self.integer(name, high=TOTAL_MAX)

    def text(self, name: str, *, bytes_max: int = ID_BYTES_MAX) -> str:
        value = self._map.get(name)
        if not isinstance(value, str) or len(value.encode(errors="surrogatepass")) > bytes_max:
            raise self.bad(name, f"text of at most {bytes_max} bytes")
        return value

    def binary(self, name: str, *, size: int | None = None, size_max: int = OBJECT_BYTES_MAX) -> bytes:
        value = self._map.get(name)
        if not isinstance(value, bytes) or len(value) > size_max or (size is not None and len(value) != size):
            raise self.bad(name, f"{size if size is not None else f'at most {size_max}'} bytes")
        return value

    def boolean(self, name: str) -> bool:
        value = self._map.get(name)
        if not isinstance(value, bool):
            raise self.bad(name, "a boolean")
        return value

    def map(self, name: str) -> Fields:
        return Fields(self._map.get(name), f"{self.what}: {name}")

    def maps(self, name: str, *, items_max: int = _CONTAINER_ITEMS_MAX) -> list[Fields]:
        items = self._items(name, items_max, "maps")
        return [Fields(item, f"{self.what}: {name}[{number}]") for number, item in enumerate(items)]

    def integers(self, name: str, *, items_max: int = _CONTAINER_ITEMS_MAX) -> list[int]:
        items = self._items(name, items_max, "integers")
        numbers = [n for n in items if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= INTEGER_MAX]
        if len(numbers) != len(items):
            raise self.bad(name, f"integers in [0, {INTEGER_MAX}]")
        return numbers

    def texts(self, name: str, *, items_max: int = _CONTAINER_ITEMS_MAX) -> list[str]:
        items = self._items(name, items_max, "texts")
        texts = [text for text in items if isinstance(text, str)]
        if len(texts) != len(items):
            raise self.bad(name, "texts")
        return texts

    def _items(self, name: str, items_max: int, what: str) -> list[Value]:
        value = self._map.get(name)
        if not isinstance(value, list) or len(value) > items_max:
            raise self.bad(name, f"a list of at most {items_max} {what}")
        return value

    def bad(self, name: str, expected: str) -> CorruptError:
        """The error for a field of a wrong type or value; raise it."""
        return CorruptError(f"{self.what}: field {name!r} is not {expected}")
