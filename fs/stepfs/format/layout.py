"""How a dataclass is stored in a map, declared once: its fields in the order of the map, for its encoder and its decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from stepfs.format.codec import Fields

T = TypeVar("T")


class Stored(NamedTuple):
    """A field: its key, how its value is read, and how it is written if that is another one."""

    name: str
    read: Callable[[Fields, str], Any]
    write: Callable[[Any], object] | None = None


def stored(name: str, read: Callable[..., Any], **bounds: int) -> Stored:
    """A field that is stored as it is; `read` is a method of `Fields`."""
    return Stored(name, partial(read, **bounds) if bounds else read)


class Layout(Generic[T]):
    """Of `make`, a dataclass."""

    def __init__(self, make: Callable[..., T], **fields: Stored) -> None:
        self._make = make
        self._writes = [(field, name, write) for field, (name, _, write) in fields.items()]
        self._reads = [(field, name, read) for field, (name, read, _) in fields.items()]

    def body(self, value: T) -> dict[str, Any]:
        return {
            name: getattr(value, field) if write is None else write(getattr(value, field))
            for field, name, write in self._writes
        }

    def read(self, fields: Fields, **others: object) -> T:
        """The value of a map, and of `others`, fields that it does not hold."""
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
