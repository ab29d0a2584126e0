"""The envelope of every small object, bounded decoding of its contents, and how a dataclass is stored in a map.

Layout: FORMAT.md. Anything malformed is `CorruptError`, never another exception, never an allocation larger than a small
multiple of the input (`check_shape`).
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgpack
from crc32c import crc32c

from stepfs.errors import CorruptError, NewerFormatError, RefusedError, StepfsError
from stepfs.format.ids import ID_BYTES_MAX, INTEGER_MAX, TOTAL_MAX

WEIGHT_PER_BYTE: Final = 16
WEIGHT_FREE: Final = 4 << 20  # a position (64 KiB) of the most wasteful shape fits
_VALUE: Final = 60  # a place in a list and the largest scalar that is not mostly its own bytes
_CONTAINER: Final = 16  # in addition to its own value in its parent
_PAIR: Final = 140  # a dict's entry at its worst load, a key, a value
_EXTENSION: Final = 120
# At most a third of the bytes begin lists inside each other, and none of these has room made for more items than there are
# bytes: 8 bytes each, so together less than what is free.
ALWAYS_FITS: Final = 1 << 10

_EXTENSIONS: Final = {0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)}
MAGIC: Final = b"stepfs"
FORMAT_VERSION: Final = 1
# Named in objects, so that what one version did wrong can be found. An import of the package would be one of all its names.
WRITER: Final = "stepfs " + sys.modules["stepfs"].__version__
KNOWN_NEEDS: Final[frozenset[str]] = frozenset()  # what an object may need of who reads it, or writes beside it
OBJECT_BYTES_MAX: Final = 256 << 20
_COVERED = struct.Struct("<6sBBI")  # the part of the header that the checksum covers
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES: Final = _COVERED.size + _CHECKSUM.size
_CONTAINER_ITEMS_MAX: Final = 1 << 14

T = TypeVar("T")
Value = None | bool | int | float | str | bytes | list["Value"] | dict["Value", "Value"]
Later = tuple[tuple[Value, Value], ...]  # what a map holds under keys that this version does not know


def check_shape(body: bytes | memoryview, what: str) -> None:
    """`CorruptError` unless `body` may be one msgpack value that takes a small multiple of its size in memory.

    A value that is malformed in another way passes: msgpack refuses it.
    """
    end = len(body)
    if end <= ALWAYS_FITS:
        return
    weight_max = WEIGHT_FREE + WEIGHT_PER_BYTE * end
    weight = at = 0
    pending = 1
    lengths = _LENGTHS
    while pending:
        if at >= end:
            raise CorruptError(f"{what}: malformed msgpack (truncated)")
        head = body[at]
        at += 1
        pending -= 1
        length = lengths[head]
        if length >= 0:
            at += length
            continue
        counted, announces, size = _COUNTED[head]
        if counted:
            size = int.from_bytes(body[at : at + counted], "big")
            at += counted
        if announces:
            pending += announces * size
            weight += _CONTAINER + size * (_VALUE if announces == 1 else _PAIR)
            if pending > end - at or weight > weight_max:
                raise CorruptError(f"{what}: malformed msgpack (claims more than an object of {end} bytes may hold)")
        else:
            at += size
            if head in _EXTENSIONS:
                at += 1
                weight += _EXTENSION
    if weight > weight_max:
        raise CorruptError(f"{what}: malformed msgpack (too many extensions for {end} bytes)")


def _counted() -> dict[int, tuple[int, int, int]]:
    """First byte → (bytes of the count, values per count: 0 for bytes, the count if the first byte contains it)."""
    table = {0x80 + size: (0, 2, size) for size in range(16)}  # fixmap
    table |= {0x90 + size: (0, 1, size) for size in range(16)}  # fixarray
    table |= {0xD4 + power: (0, 0, 1 << power) for power in range(5)}  # fixext
    for power in range(3):
        width = 1 << power
        table |= {first + power: (width, 0, 0) for first in (0xC4, 0xC7, 0xD9)}  # bin, ext, str
    return table | {0xDC: (2, 1, 0), 0xDD: (4, 1, 0), 0xDE: (2, 2, 0), 0xDF: (4, 2, 0)}  # array, map


def _lengths() -> tuple[int, ...]:
    """Per first byte: the number of bytes that follow it, or -1 for those in `_COUNTED`."""
    table = [0] * 256  # fixint, nil, booleans, and the byte that is never used
    for size in range(32):
        table[0xA0 + size] = size  # fixstr
    for first, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        table[first] = size
    for power in range(4):
        table[0xD0 + power] = 1 << power
    for first in _COUNTED:
        table[first] = -1
    return tuple(table)


_COUNTED: Final = _counted()
_LENGTHS: Final = _lengths()


class Kind(enum.IntEnum):
    """The kind of an enveloped object; stored, so numbers never change meaning."""

    LAKE = 1
    COMMIT = 2
    SNAPSHOT = 3
    STEP_ENTRY = 4
    CONTROL = 5
    TGB_INDEX = 6
    NODE = 7


def signed(body: Mapping[str, object]) -> dict[str, object]:
    """The map with the name of its writer."""
    return {**body, "writer": WRITER}


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
    fields = Fields(unpack(body, what), what)
    if "needs" in fields:
        check_needs(fields.texts("needs"), what)
    return fields


def check_needs(needs: Collection[str], what: str) -> None:
    """`NewerFormatError` if one of them is not known here."""
    if unknown := sorted(set(needs) - KNOWN_NEEDS):
        raise NewerFormatError(f"{what}: needs {', '.join(unknown)}, which this stepfs does not have; upgrade stepfs")


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

    def others(self, known: frozenset[str]) -> Later:
        """What stands under keys that are not `known`."""
        if self._map.keys() <= known:
            return ()
        return tuple(item for item in self._map.items() if item[0] not in known)

    def integer(self, name: str, *, low: int = 0, high: int = INTEGER_MAX) -> int:
        value = self._map.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad(name, f"an integer in [{low}, {high}]")
        return value

    def total(self, name: str) -> int:
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

    def hints(self, name: str, *, items_max: int) -> tuple[bytes, ...]:
        """Binaries that nothing depends on: none, where another value stands."""
        value = self._map.get(name)
        if not isinstance(value, list) or len(value) > items_max:
            return ()
        found = tuple(each for each in value if isinstance(each, bytes))
        return found if len(found) == len(value) else ()

    def _items(self, name: str, items_max: int, what: str) -> list[Value]:
        value = self._map.get(name)
        if not isinstance(value, list) or len(value) > items_max:
            raise self.bad(name, f"a list of at most {items_max} {what}")
        return value

    def bad(self, name: str, expected: str) -> CorruptError:
        """The error for a field of a wrong type or value; raise it."""
        return CorruptError(f"{self.what}: field {name!r} is not {expected}")


class Stored(NamedTuple):
    """A field: its key, how its value is read, and how it is written if that is another one."""

    name: str
    read: Callable[[Fields, str], Any]
    write: Callable[[Any], object] | None = None


def stored(name: str, read: Callable[..., Any], **bounds: int) -> Stored:
    """A field that is stored as it is; `read` is a method of `Fields`."""
    return Stored(name, partial(read, **bounds) if bounds else read)


class Layout(Generic[T]):
    """How the dataclass `make` is stored in a map. A field `later` keeps what the map holds under other keys, but for those
    `beside`: it is written again where the map is.
    """

    def __init__(self, make: type[T], beside: Collection[str] = (), **fields: Stored) -> None:
        self._make = make
        self._writes = [(field, name, write) for field, (name, _, write) in fields.items()]
        self._reads = [(field, name, read) for field, (name, read, _) in fields.items()]
        self._known = frozenset((*beside, *(name for name, _, _ in fields.values())))
        self._keeps_later = any(field.name == "later" for field in dataclasses.fields(make))  # type: ignore[arg-type]

    def body(self, value: T) -> dict[Any, Any]:
        body = {
            name: getattr(value, field) if write is None else write(getattr(value, field))
            for field, name, write in self._writes
        }
        later: Later = value.later if self._keeps_later else ()  # type: ignore[attr-defined]
        return body | dict(later) if later else body

    def read(self, fields: Fields, **others: object) -> T:
        """The value of a map, and of `others`, fields that it does not hold."""
        if self._keeps_later:
            others["later"] = fields.others(self._known)
        for field, name, read in self._reads:
            others[field] = read(fields, name)
        return self._make(**others)

    def several(self, name: str, items_max: int) -> Stored:
        """A field that is a tuple of these."""
        return Stored(
            name,
            lambda fields, key: tuple(map(self.read, fields.maps(key, items_max=items_max))),
            lambda values: list(map(self.body, values)),
        )
