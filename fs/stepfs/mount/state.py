"""What the next daemon of a mount must know of this one, in a file without a name that outlives both.

    what                                      written                                  a kill loses
    decides what happens to data: `decide`    when it changes, before it is acted on   nothing
    of the readers, to fetch ahead: `note`    each second                              a second
    the primed files: `primed`                in place, a record for each change       nothing
    what is open: `close`                     when a mount is given away               all, and it is opened again

Each of the maps has two slots. A slot is a row of records: length, CRC-32C, number, JSON; the first holds the whole map, the
others change it. The map that counts begins with the greatest number; the record that a kill cut off ends it. The first 64 KiB
belong to whoever owns the processes.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from crc32c import crc32c

from stepfs.format.ids import SliceKey

_log = logging.getLogger("stepfs.mount")

OWNER_BYTES: Final = 64 << 10
_SLOT_BYTES: Final = {"decided": 64 << 20, "noted": 64 << 20, "open": 512 << 20}
_GROWTH_BYTES: Final = 64 << 10  # by which changes may outgrow the whole map before it is written anew
_HEAD: Final = struct.Struct("<IIQ")  # length, CRC-32C of number and JSON, number
_NUMBER: Final = struct.Struct("<Q")
_FILE: Final = struct.Struct(
    "<QQII"
)  # step, bytes, slice, flags; the flags last: a record that is cut off is a free one
_FLAGS_AT: Final = _FILE.size - 4
_USED: Final = 1
_UNNEEDED: Final = 2
_NUMBER_MAX: Final = (1 << 63) - 1

T = TypeVar("T")
Values = Mapping[str, object]

_unknown_told: Final[set[str]] = set()


class _Slots:
    """A map of which a kill loses no change that was written."""

    def __init__(self, descriptor: int, offset: int, slot_bytes: int) -> None:
        self._descriptor, self._offset, self._slot_bytes = descriptor, offset, slot_bytes
        self._number, self._place, self._end, self._whole_bytes = 0, 0, 0, 0
        self.is_read = False  # since another daemon may have written

    def read(self) -> dict[str, object]:
        """The newest map; empty where nothing whole is there."""
        found = [self._read_slot(place) for place in (0, 1)]
        self._number, self._place, values = max(found, key=lambda slot: slot[0])
        self.is_read = True
        return values

    def _read_slot(self, place: int) -> tuple[int, int, dict[str, object]]:
        values: dict[str, object] = {}
        number = at = 0
        while (record := self._record(place, at)) is not None and (not at or record[0] == number + 1):
            number, changes, size = record
            _change(values, changes)
            at += size
        return number, place, values

    def _record(self, place: int, at: int) -> tuple[int, dict[str, object], int] | None:
        start = self._offset + place * self._slot_bytes + at
        head = os.pread(self._descriptor, _HEAD.size, start)
        if len(head) < _HEAD.size:
            return None
        length, crc, number = _HEAD.unpack(head)
        if not 0 < length <= self._slot_bytes - at - _HEAD.size or not 0 < number < _NUMBER_MAX:
            return None
        body = os.pread(self._descriptor, length, start + _HEAD.size)
        if len(body) < length or crc32c(_NUMBER.pack(number) + body) != crc:
            return None
        try:
            changes = json.loads(body)
        except (ValueError, RecursionError):
            return None
        return (number, changes, _HEAD.size + length) if isinstance(changes, dict) else None

    def write(self, values: Values) -> None:
        """The whole map, into the slot that is not the newest. OSError. Where another daemon has written, `read` first."""
        self._place, self._end = 1 - self._place, 0
        self._append(values)
        self._whole_bytes = self._end

    def change(self, changes: Values, values: Values) -> None:
        """Append changes; None removes a name. `values`: the map with them. OSError."""
        if self._end > 2 * self._whole_bytes + _GROWTH_BYTES:
            self.write(values)
        else:
            self._append(changes)

    def _append(self, values: Values) -> None:
        body = json.dumps(values).encode()
        number = self._number + 1
        record = _HEAD.pack(len(body), crc32c(_NUMBER.pack(number) + body), number) + body
        if self._end + len(record) > self._slot_bytes:
            raise OSError(0, f"{len(body)} bytes of state are too many")
        start = self._offset + self._place * self._slot_bytes + self._end
        if os.pwrite(self._descriptor, record, start) < len(record):
            raise OSError(0, "no room")
        self._number, self._end = number, self._end + len(record)


def _change(values: dict[str, object], changes: Values) -> None:
    for name, value in changes.items():
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value


class PrimedFiles:
    """The files that are primed: a record each, written where it changes."""

    def __init__(self, descriptor: int, offset: int, guarded: Callable[[Callable[[], object]], None]) -> None:
        self._descriptor, self._offset, self._guarded = descriptor, offset, guarded
        self._free: list[int] = []
        self._count = 0
        self.writes = False
        self.written = 0  # records

    def read(self) -> Iterator[tuple[int, SliceKey, int, bool]]:
        """(place, slice, bytes, whether its pages may go) of each; the other places are free from now on."""
        size = max(0, os.fstat(self._descriptor).st_size - self._offset)
        table = os.pread(self._descriptor, size - size % _FILE.size, self._offset)
        self._free, self._count = [], len(table) // _FILE.size
        for place, (step, length, index, flags) in enumerate(_FILE.iter_unpack(table)):
            if flags & _USED and step <= _NUMBER_MAX and length <= _NUMBER_MAX:
                yield place, (step, index), length, flags & _UNNEEDED != 0
            else:
                self._free.append(place)

    def enter(self, key: SliceKey, length: int) -> int:
        """Returns the file's place."""
        if self._free:
            place = self._free.pop()
        else:
            place, self._count = self._count, self._count + 1
        self._put(place, 0, _FILE.pack(key[0], length, key[1], _USED))
        return place

    def mark(self, place: int, *, unneeded: bool) -> None:
        """Say whether its pages may go."""
        self._put(place, _FLAGS_AT, (_USED | _UNNEEDED * unneeded).to_bytes(4, "little"))

    def leave(self, place: int) -> None:
        """The file is primed no more."""
        self._put(place, _FLAGS_AT, bytes(4))
        self._free.append(place)

    def write(self, files: Iterable[tuple[int, SliceKey, int, bool]]) -> None:
        """All of it, where another daemon has written meanwhile: what `read` gives."""
        files = [*files]
        size = max(0, os.fstat(self._descriptor).st_size - self._offset)
        self._count = max([self._count, -(-size // _FILE.size), *(place + 1 for place, *_ in files)])
        table, free = bytearray(self._count * _FILE.size), set(range(self._count))
        for place, (step, index), length, unneeded in files:
            _FILE.pack_into(table, place * _FILE.size, step, length, index, _USED | _UNNEEDED * unneeded)
            free.discard(place)
        self._free = [*free]
        if table and self.writes:
            self._guarded(lambda: os.pwrite(self._descriptor, table, self._offset))

    def _put(self, place: int, at: int, data: bytes) -> None:
        if self.writes:
            self.written += 1
            where = self._offset + place * _FILE.size + at
            self._guarded(lambda: os.pwrite(self._descriptor, data, where))


class State:
    """The state of one mount, in the file behind `descriptor`, which belongs to the caller.

    One daemon writes at a time: that of `fresh`, or the one that called `begin` last. What is decided before that is kept in
    memory. A write that fails is logged once, and the mount goes on.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        offsets, at = [], OWNER_BYTES
        for slot_bytes in _SLOT_BYTES.values():
            offsets.append((at, slot_bytes))
            at += 2 * slot_bytes
        self._decided, self._noted, self._open = (_Slots(descriptor, *where) for where in offsets)
        self.primed = PrimedFiles(descriptor, at, self._guarded)
        self._values: dict[str, object] = {}
        self._writes = self._troubled = False

    @classmethod
    def fresh(cls) -> State:
        """Of a mount that begins: in a new file, and written from now on."""
        state = cls(os.memfd_create("stepfs-state"))
        state._writes = state.primed.writes = True
        return state

    def read(self) -> dict[str, object]:
        """What the daemon that writes has decided, by name; nothing here changes."""
        return self._decided.read()

    def read_noted(self) -> dict[str, object]:
        """What it has noted of the readers."""
        return self._noted.read()

    def read_open(self) -> dict[str, object]:
        """What it had open when it stopped; of no worth after its death."""
        return self._open.read()

    def adopt(self, values: Values) -> None:
        """Go on from these decisions of the daemon before, but for those that were made here already."""
        _change(self._values, {name: value for name, value in values.items() if name not in self._values})

    def decide(self, changes: Values) -> None:
        """Put on record before it is acted on: JSON values by name, None for one that is void."""
        _change(self._values, changes)
        if self._writes:
            self._guarded(lambda: self._decided.change(changes, self._values))

    def note(self, values: Values) -> None:
        """What only warms; in a thread, for it takes time to encode."""
        if self._writes:
            self._guarded(lambda: self._noted.write(values))

    def close(self, values: Values) -> None:
        """What is open, of a daemon that gives the mount away: it writes no more."""
        self._guarded(lambda: self._decided.write(self._values))  # nobody reads requests: the next one reads one record
        self._open.read()
        self._guarded(lambda: self._open.write(values))
        self._writes = self.primed.writes = False
        for slots in (self._decided, self._noted, self._open):
            slots.is_read = False

    def begin(self) -> None:
        """Be the one that writes, from now on: of a daemon that follows, or that goes on because no other one did."""
        self._writes = self.primed.writes = True
        for slots in (self._decided, self._noted, self._open):
            if not slots.is_read:
                slots.read()
        self._guarded(lambda: self._decided.write(self._values))
        self._guarded(lambda: self._open.write({}))

    def _guarded(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._troubled:
                _log.warning("the state of this mount cannot be written: %s", error.strerror or error)
            self._troubled = True


@cache
def types_of(cls: type) -> dict[str, Any]:
    """A dataclass's; the first time it takes a fraction of a millisecond."""
    return get_type_hints(cls)


def taken(cls: type[T], found: object) -> T:
    """A dataclass, each of whose fields has a default, from JSON of any version: what is unknown, or of another type, is left
    out.
    """
    hints = types_of(cls)  # type: ignore[arg-type]  # a class has a hash
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if not isinstance(found, dict):
        return cls()
    tell_unknown(f"{cls.__name__}.{name}" for name in found.keys() - names)
    return cls(**{name: found[name] for name in names & found.keys() if _fits(found[name], hints[name])})


def tell_unknown(names: Iterable[str]) -> None:
    """Say once of each name that a daemon of another version has written it."""
    for name in sorted(set(names) - _unknown_told):
        _unknown_told.add(name)
        _log.info("%s of the daemon before is not known to this version", name)


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of a type, and no number negative or beyond all that we count."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if hint in {int, float}:
        is_number = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
        return is_number and 0 <= value <= _NUMBER_MAX  # type: ignore[operator]
    return value is None if hint is type(None) else isinstance(value, hint)
