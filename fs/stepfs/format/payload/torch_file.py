"""The tensors of a `.pt` file, without torch and without unpickling.

A `.pt` is a zip: `<name>/data.pkl`, a pickle that describes tensors by storage, offset, shape and strides
(`torch_pickle`), and one uncompressed member `<name>/data/<key>` per storage. The pickle lies within the first 1 MiB of
the file, and the walk over its value is bounded.

Rejected: `torch.load(weights_only=True, mmap=True)`: a second of import, for a producer that may have no torch.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from typing import Final

from stepfs.format.payload.arrays import ArrayInfo, PayloadArrays, sizes_of
from stepfs.format.payload.dtypes import DTYPE_BYTES
from stepfs.format.payload.excerpt import HEAD_BYTES_MAX, Excerpt, ExcerptFile, UnreadablePayloadError
from stepfs.format.payload.schema import ONLY_ARRAY
from stepfs.format.payload.torch_calls import ARGUMENTS, Bytes, Call, Global, called
from stepfs.format.payload.torch_pickle import StorageRef, read_pickle

_VISITED_MAX: Final = 20_000
_DEPTH_MAX: Final = 16
_NAME_CHARACTERS_MAX: Final = 1024
_REASON_CHARACTERS_MAX: Final = 120
_PLAIN: Final = (type(None), bool, int, float, str)
_SHOWN_AS_TEXT: Final = (complex, Bytes, Global)


def read_torch_file(excerpt: Excerpt) -> PayloadArrays:
    """The tensors and plain values of a `.pt` file; `UnreadablePayloadError`."""
    try:
        with zipfile.ZipFile(ExcerptFile(excerpt)) as archive:
            return _read(archive, excerpt)
    except UnreadablePayloadError:
        raise
    except Exception as error:  # zipfile raises whatever hostile bytes lead it to
        raise UnreadablePayloadError(
            f"is no file of torch.save ({type(error).__name__}: {str(error)[:_REASON_CHARACTERS_MAX]})"
        ) from error


def _read(archive: zipfile.ZipFile, excerpt: Excerpt) -> PayloadArrays:
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnreadablePayloadError("is a zip without one data.pkl; it is no file of torch.save")
    members = {info.filename: info for info in archive.infolist()}
    prefix = pickles[0].filename.removesuffix("data.pkl")
    if prefix + "byteorder" in members and _content(archive, members[prefix + "byteorder"], 16) != b"little":
        raise UnreadablePayloadError("was saved on a big-endian machine")
    value, storages = read_pickle(_content(archive, pickles[0], HEAD_BYTES_MAX))
    found = _Tensors(lambda key: _place(members.get(f"{prefix}data/{key}"), excerpt))
    found.visit("", value, 0)
    if not found.storages.issuperset(storages):
        raise UnreadablePayloadError(
            "holds values that belong to none of its tensors; save tensors and plain values only"
        )
    return PayloadArrays(tuple(found.arrays), found.facts)


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, bytes_max: int) -> bytes:
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > bytes_max:
        raise UnreadablePayloadError(
            f"has a {member.filename.rpartition('/')[2]} that is compressed or longer than {bytes_max} bytes"
        )
    with archive.open(member) as file:
        return file.read(bytes_max)


def _place(member: zipfile.ZipInfo | None, excerpt: Excerpt) -> tuple[int, int]:
    """Where the file has a storage: offset of its local header, and bytes. Its values follow the header."""
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise UnreadablePayloadError("lacks the values of a tensor, or has them compressed")
    if member.header_offset + member.file_size > excerpt.length:
        raise UnreadablePayloadError("ends within the values of a tensor")
    return member.header_offset, member.file_size


class _Tensors:
    """The walk over an unpickled description: tensors by dotted name, short plain values as facts."""

    def __init__(self, place: Callable[[str], tuple[int, int]]) -> None:
        self.arrays: list[ArrayInfo] = []
        self.facts: dict[str, object] = {}
        self.storages: set[StorageRef] = set()  # whose tensors were found
        self._place = place
        self._visited = 0

    def visit(self, name: str, value: object, depth: int) -> None:
        self._visited += 1
        if max(self._visited - _VISITED_MAX, depth - _DEPTH_MAX, len(name) - _NAME_CHARACTERS_MAX) > 0:
            raise UnreadablePayloadError("holds more values, or deeper ones, than stepfs looks at")
        if isinstance(value, Call):
            self._call(name, value, depth)
        elif isinstance(value, dict):
            for key, each in value.items():
                self.visit(f"{name}.{key}" if name else str(key), each, depth + 1)
        elif isinstance(value, list | tuple):
            if all(isinstance(each, (*_PLAIN, *_SHOWN_AS_TEXT)) for each in value):
                self._visited += len(value)
                self.facts[name] = [_plain(each) for each in value]
            else:
                for number, each in enumerate(value):
                    self.visit(f"{name}.{number}" if name else str(number), each, depth + 1)
        elif isinstance(value, (*_PLAIN, *_SHOWN_AS_TEXT)):
            self.facts[name] = _plain(value)

    def _call(self, name: str, call: Call, depth: int) -> None:
        function, arguments = call.function, call.arguments
        if len(arguments) not in ARGUMENTS[function]:
            raise UnreadablePayloadError("describes a tensor in a way that stepfs cannot follow")
        if function == "_rebuild_parameter":
            self.visit(name, arguments[0], depth + 1)
        elif function == "_rebuild_parameter_with_state":
            self._with_attributes(name, arguments[0], arguments[3], depth)
        elif function == "_rebuild_from_type_v2":
            rebuild, _, parts, attributes = arguments
            self._with_attributes(name, called(rebuild, parts), attributes, depth)
        elif function == "_rebuild_sparse_tensor":
            self._sparse(name, arguments[0], arguments[1], depth)
        elif function == "_rebuild_meta_tensor_no_storage":
            self._meta(name, arguments)
        else:
            if function == "_rebuild_qtensor":
                self._parts(name, arguments[4], depth)  # of a quantizer by channel
            self._tensor(name, arguments)

    def _with_attributes(self, name: str, tensor: object, attributes: object, depth: int) -> None:
        """A tensor to which Python attributes were added, which may be tensors."""
        self.visit(name, tensor, depth + 1)
        if isinstance(attributes, dict | tuple):
            self.visit(name, attributes, depth + 1)

    def _sparse(self, name: str, layout: object, data: object, depth: int) -> None:
        """One array, of the dtype of its values; its parts are no arrays of the payload."""
        found = self._parts(name, data, depth)
        sizes = (
            [sizes_of(part) for part in data if isinstance(part, tuple)] if isinstance(data, tuple) else []
        )
        if not found or len(sizes) != 1 or sizes[0] is None or not isinstance(layout, str):
            raise UnreadablePayloadError("describes a sparse tensor in a way that stepfs cannot follow")
        dtype = f"{layout.removeprefix('torch.')} {found[-1].dtype}"
        nbytes = sum(part.nbytes for part in found)
        self.arrays.append(ArrayInfo(name or ONLY_ARRAY, dtype, sizes[0], 0, nbytes))

    def _parts(self, name: str, values: object, depth: int) -> list[ArrayInfo]:
        """The tensors among the values that make a tensor: they are no arrays of the payload."""
        before = len(self.arrays)
        for part in values if isinstance(values, tuple) else ():
            if isinstance(part, Call):
                self.visit(name, part, depth + 1)
        found = self.arrays[before:]
        del self.arrays[before:]
        return found

    def _meta(self, name: str, arguments: tuple[object, ...]) -> None:
        """A tensor without values."""
        dtype, sizes = arguments[0], sizes_of(arguments[1])
        if not isinstance(dtype, Global) or sizes is None:
            raise UnreadablePayloadError("describes a tensor in a way that stepfs cannot follow")
        self.arrays.append(ArrayInfo(name or ONLY_ARRAY, f"meta {dtype.name}", sizes, 0, 0))

    def _tensor(self, name: str, arguments: tuple[object, ...]) -> None:
        storage, (first, *_) = arguments[0], sizes_of([arguments[1]]) or (-1,)
        sizes, steps = sizes_of(arguments[2]), sizes_of(arguments[3])
        if not isinstance(storage, StorageRef) or first < 0 or sizes is None or steps is None:
            raise UnreadablePayloadError("describes a tensor in a way that stepfs cannot follow")
        named = [each.name for each in arguments[4:] if isinstance(each, Global)]
        dtype = storage.dtype or (named[-1] if named else "bytes")
        self.storages.add(storage)
        item = 4 if dtype == "qint32" else DTYPE_BYTES.get(dtype, 1)
        count: int = math.prod(sizes)
        member_at, available = self._place(storage.key)
        if storage.count * (item if storage.dtype else 1) != available:
            raise UnreadablePayloadError(
                f"has other bytes for the tensor {name[:80]!r} than its description says"
            )
        last = first + sum((size - 1) * step for size, step in zip(sizes, steps, strict=False)) + 1
        if len(steps) != len(sizes) or (count and last * item > available):
            raise UnreadablePayloadError(f"has a tensor {name[:80]!r} that is larger than its values")
        rows = [step for size, step in zip(sizes, steps, strict=True) if size != 1]
        dense = [math.prod(sizes[at + 1 :]) for at, size in enumerate(sizes) if size != 1]
        # Conjugated and negated views say so in a map; their bytes are those of the tensor that they view.
        strided = rows != dense or any(isinstance(each, dict) and each for each in arguments[4:])
        self.arrays.append(
            ArrayInfo(
                name or ONLY_ARRAY, dtype, sizes, first * item, count * item, strided, member_at=member_at
            )
        )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, _SHOWN_AS_TEXT) else value
