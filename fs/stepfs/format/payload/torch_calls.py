"""The calls in the pickle of a `.pt` file: which ones there may be, and what becomes of them.

They are those that torch's `weights_only` unpickler allows, and of which stepfs knows the arguments. Nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from stepfs.format.payload.excerpt import UnreadablePayloadError

_MODULES: Final = {
    "collections",
    "torch",
    "torch._tensor",
    "torch._utils",
    "torch.nn.parameter",
    "torch.serialization",
    "torch.storage",
}
_TENSOR_MODULES: Final = {"torch._utils", "torch._tensor"}
_NAMES: Final = {"_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set"}
_PYTHON_2: Final = {
    "__builtin__": "builtins"
}  # protocol 2, which torch.save writes, has the names of Python 2
_LATIN_1: Final = {"latin1", "latin-1"}
_WORDS_MAX: Final = 80
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Global:
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Call:
    """A tensor: `function(*arguments)`, not carried out."""

    function: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bytes:
    """Bytes or a bytearray, of which only the length is kept."""

    length: int

    def __str__(self) -> str:
        return f"{self.length} bytes"


def allowed_global(module: object, name: object) -> Global:
    """The mark of a name; `UnreadablePayloadError` for one that is of no use in a description of tensors."""
    if isinstance(module, str) and isinstance(name, str):
        found = Global(_PYTHON_2.get(module, module), name)
        if found.module in _MODULES or str(found) in _NAMES:
            return found
    raise UnreadablePayloadError(
        f"names {str(module)[:60]}.{str(name)[:60]}, which unpickling would import; save tensors and plain values only"
    )


def called(function: object, arguments: object) -> object:
    """What a call makes: a plain value, or the mark of a tensor. `UnreadablePayloadError` for any other call."""
    if isinstance(function, Global) and isinstance(arguments, tuple):
        name = str(function)
        if function.module in _TENSOR_MODULES and function.name in ARGUMENTS:
            return Call(function.name, arguments)
        if name in _VALUES:
            return _VALUES[name](arguments)
        raise UnreadablePayloadError(
            f"calls {name[:_WORDS_MAX]}, which stepfs does not follow; save dense tensors and plain values only"
        )
    raise UnreadablePayloadError("holds a pickle that stepfs cannot follow")


def _map(arguments: tuple[object, ...]) -> object:
    """Of `Counter`: the counts are its argument. Of `OrderedDict`: items follow."""
    if not arguments:
        return {}
    [counts] = arguments
    return _of_type(dict, counts)


def _set(arguments: tuple[object, ...]) -> object:
    return _of_type(list, arguments[0]) if arguments else []


def _size(arguments: tuple[object, ...]) -> object:
    [sizes] = arguments
    return _of_type(tuple, sizes)


def _bytes(arguments: tuple[object, ...]) -> object:
    """Protocol 2 has no bytes, only text in Latin-1: one character is one byte."""
    text, encoding = arguments
    if encoding not in _LATIN_1:
        raise UnreadablePayloadError("holds bytes in a form that torch.save does not write")
    return Bytes(len(_of_type(str, text)))


def _bytearray(arguments: tuple[object, ...]) -> object:
    return _of_type(Bytes, arguments[0]) if arguments else Bytes(0)


def _complex(arguments: tuple[object, ...]) -> object:
    real, imaginary = arguments
    return complex(_of_type(float, real), _of_type(float, imaginary))


def _words(arguments: tuple[object, ...]) -> object:
    """A device ("cuda", 0), or a layout."""
    if not all(isinstance(each, str | int) and len(str(each)) <= _WORDS_MAX for each in arguments):
        raise UnreadablePayloadError("holds a device or a layout that torch.save does not write")
    return ":".join(map(str, arguments))


def _of_type(kind: type[_Kind], value: object) -> _Kind:
    if not isinstance(value, kind):
        raise UnreadablePayloadError("holds a pickle that stepfs cannot follow")
    return value


ARGUMENTS: Final = {  # how many each way to make a tensor takes
    "_rebuild_from_type_v2": {4},
    "_rebuild_meta_tensor_no_storage": {4},
    "_rebuild_parameter": {3},
    "_rebuild_parameter_with_state": {4},
    "_rebuild_qtensor": {7},
    "_rebuild_sparse_tensor": {2},
    "_rebuild_tensor": {4},
    "_rebuild_tensor_v2": {6, 7},
    "_rebuild_tensor_v3": {7, 8},
}
_VALUES: Final[dict[str, Callable[[tuple[object, ...]], object]]] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.set": _set,
    "collections.Counter": _map,
    "collections.OrderedDict": _map,
    "torch.Size": _size,
    "torch.device": _words,
    "torch.serialization._get_layout": _words,
}
