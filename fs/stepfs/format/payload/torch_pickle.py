"""The pickle of a `.pt` file, read without running it.

A small machine follows the opcodes that `torch.save` writes and builds plain values and marks: a global stays a name
(`Global`), a call that makes a tensor stays a mark (`Call`), one that makes bytes, a set or a complex number becomes a
short plain value (`torch_calls`). A pickle that would run a program is found to name one, and is refused for it. So is one
that calls anything else. Opcodes are counted; the pickle is as short as its caller lets it be.

Rejected: `pickle.Unpickler` with `find_class` and `persistent_load` replaced: five bytes make its memo take gigabytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stepfs.format.payload.excerpt import UnreadablePayloadError
from stepfs.format.payload.torch_calls import Global, allowed_global, called

_OPCODES_MAX: Final = 400_000
_STORAGES: Final[dict[str, str | None]] = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
    "Untyped": None,
}
_KEYS: Final = (str, int, float, complex, type(None))  # other keys are shown by their type and number
_MARK: Final = object()


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """The values of tensors, in a member of the zip. `dtype` None: the tensor names it, and `count` is of bytes."""

    dtype: str | None
    key: str
    count: int


def read_pickle(data: bytes) -> tuple[object, list[StorageRef]]:
    """The value of the pickle, of plain values, `Global`, `Call` and `StorageRef`, and every `StorageRef` that it makes.

    `UnreadablePayloadError` for a pickle that stepfs does not follow.
    """
    machine = _Machine()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count > _OPCODES_MAX:
            break
        if opcode.name == "STOP":
            return machine.stack.pop(), machine.storages
        machine.follow(opcode.name, argument)
    raise UnreadablePayloadError("holds a pickle without an end, or with more than stepfs looks at")


class _Machine:
    """The stack and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.storages: list[StorageRef] = []
        self._memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in _IGNORED:
            raise UnreadablePayloadError(f"holds a pickle that torch.save does not write (opcode {name})")

    def remember(self, argument: int | None) -> None:
        self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]

    def recall(self, argument: int) -> None:
        self.stack.append(self._memo[argument])

    def name(self, argument: str) -> None:
        self.stack.append(allowed_global(*argument.split(" ", 1)))

    def name_on_stack(self, _argument: None) -> None:
        named, module = self.stack.pop(), self.stack.pop()
        self.stack.append(allowed_global(module, named))

    def refer(self, _argument: None) -> None:
        self.stack.append(_storage(self.stack.pop()))
        self.storages.append(self.stack[-1])

    def call(self, _argument: None) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(called(function, arguments))

    def drop(self, _argument: None) -> None:
        """POP; and BUILD, which would change the object below."""
        self.stack.pop()

    def tuple_of(self, count: int) -> None:
        parts = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(parts[::-1]))

    def tuple_of_marked(self, _argument: None) -> None:
        self.stack.append(tuple(self._marked()))

    def set_item(self, _argument: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self, _argument: None) -> None:
        self._set(self._marked())

    def extend_by_one(self, _argument: None) -> None:
        item = self.stack.pop()
        self._extend([item])

    def extend(self, _argument: None) -> None:
        self._extend(self._marked())

    def _set(self, items: list[Any]) -> None:
        found = self.stack[-1]
        if not isinstance(found, dict):
            raise UnreadablePayloadError(
                "puts items into something that is no map; it is no file of torch.save"
            )
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[key if isinstance(key, _KEYS) else f"({type(key).__name__} {len(found)})"] = value

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise UnreadablePayloadError(
                "puts items into something that is no list; it is no file of torch.save"
            )
        self.stack[-1].extend(items)

    def _marked(self) -> list[Any]:
        """Everything above the topmost mark, which goes with it."""
        items: list[Any] = []
        while (top := self.stack.pop()) is not _MARK:
            items.append(top)
        return items[::-1]


_IGNORED: Final = {"PROTO", "FRAME"}
_PUSHED: Final = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
)
_CONSTANTS: Final[dict[str, Callable[[], object]]] = {
    "MARK": lambda: _MARK,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_OPERATIONS: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    **dict.fromkeys(("POP", "BUILD"), _Machine.drop),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _Machine.extend),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_on_stack,
    "BINPERSID": _Machine.refer,
    "TUPLE": _Machine.tuple_of_marked,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "APPEND": _Machine.extend_by_one,
}


def _storage(persistent: object) -> StorageRef:
    if isinstance(persistent, tuple) and len(persistent) == 5 and persistent[0] == "storage":
        _, kind, key, _, count = persistent
        name = kind.name.removesuffix("Storage") if isinstance(kind, Global) else None
        if name in _STORAGES and isinstance(key, str) and isinstance(count, int):
            return StorageRef(_STORAGES[name], key, count)
    raise UnreadablePayloadError("describes a storage in a way that stepfs cannot follow")
