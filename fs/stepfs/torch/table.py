"""The tensors of a `.pt` file, from the ends of it: torch unpickles their description, and no value is read.

A `.pt` is a zip: `<name>/data.pkl`, a pickle that describes tensors by storage, offset, shape and strides, and one
member `<name>/data/<key>` per storage. Loaded to the device "meta", a storage has a size and a place in the file, and
no bytes. (So a hostile description can name more values than its storage has; loading the values would find that.)
`weights_only` runs no code of the file. It does let a file take memory and time: files of strangers are read
in a process that may lose both (`process`).
"""

from __future__ import annotations

import bisect
import io
import zipfile
from typing import TYPE_CHECKING, Final

from stepfs.format.payload.arrays import ArrayInfo, PayloadArrays
from stepfs.format.payload.excerpt import Excerpt, UnreadablePayloadError
from stepfs.format.payload.schema import DIMENSIONS_MAX, ONLY_ARRAY
from stepfs.torch.need import need_torch

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from torch import Tensor

_VISITED_MAX: Final = 20_000
_DEPTH_MAX: Final = 16
_NAME_CHARACTERS_MAX: Final = 1024
_REASON_CHARACTERS_MAX: Final = 160
_PLAIN: Final = (type(None), bool, int, float, str)
_SAVE: Final = "save dense tensors and plain values only"


def torch_arrays(excerpt: Excerpt) -> PayloadArrays:
    """The tensors and plain values of a `.pt` file.

    `UnreadablePayloadError` for another file, `MissingPackageError` without a torch that reads it safely.
    """
    need_torch("looking into .pt files", for_foreign_files=True)
    import torch  # noqa: PLC0415 (optional, and heavy)

    try:
        found = _Tensors(_members(excerpt))
        value = torch.load(_File(excerpt), map_location="meta", weights_only=True)
        found.visit("", value, 0)
    except UnreadablePayloadError:
        raise
    except Exception as error:  # zipfile and torch raise whatever hostile bytes lead them to
        raise UnreadablePayloadError(
            f"is no file of tensors and plain values by torch.save ({type(error).__name__}: {_reason(error)})"
        ) from error
    if found.unused:
        raise UnreadablePayloadError(f"holds values that belong to none of its dense tensors; {_SAVE}")
    return PayloadArrays(tuple(found.arrays), found.facts)


def _reason(error: Exception) -> str:
    """The reason of the failure, without torch's advice to unpickle with code."""
    said = str(error).rpartition("WeightsUnpickler error: ")[2]
    return said.strip().partition("\n")[0].partition(". ")[0][:_REASON_CHARACTERS_MAX]


def _members(excerpt: Excerpt) -> dict[int, int]:
    """Where the file has storages that are not empty: offset of the local header → bytes."""
    with zipfile.ZipFile(_File(excerpt)) as archive:
        infos = archive.infolist()
    pickles = [info for info in infos if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnreadablePayloadError("is a zip without one data.pkl; it is no file of torch.save")
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise UnreadablePayloadError("has compressed members; torch.save writes none")
    if any(info.header_offset + info.file_size > excerpt.length for info in infos):
        raise UnreadablePayloadError("ends within one of its members")
    excerpt.read(pickles[0].header_offset, pickles[0].file_size)  # says so if it is not there
    prefix = pickles[0].filename.removesuffix(".pkl") + "/"
    values = (info for info in infos if info.filename.startswith(prefix) and info.file_size)
    return {info.header_offset: info.file_size for info in values}


class _File(io.RawIOBase):
    """An excerpt as a file. Between the ends, where local headers are looked for, it has zeros."""

    def __init__(self, excerpt: Excerpt) -> None:
        self._excerpt = excerpt
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._excerpt.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        size = min(len(view), max(0, self._excerpt.length - self._at))
        has = self._excerpt.has(self._at, size)
        view[:size] = self._excerpt.read(self._at, size) if has else bytes(size)
        self._at += size
        return size


class _Tensors:
    """The walk over a loaded value: tensors by dotted name, short plain values as facts."""

    def __init__(self, members: dict[int, int]) -> None:
        self.arrays: list[ArrayInfo] = []
        self.facts: dict[str, object] = {}
        self.unused = set(members)
        self._members = members
        self._headers = sorted(members)
        self._visited = 0

    def visit(self, name: str, value: object, depth: int) -> None:
        import torch  # noqa: PLC0415

        self._visited += 1
        if max(self._visited - _VISITED_MAX, depth - _DEPTH_MAX, len(name) - _NAME_CHARACTERS_MAX) > 0:
            raise UnreadablePayloadError("holds more values, or deeper ones, than stepfs looks at")
        if isinstance(value, torch.Tensor):
            self._tensor(name or ONLY_ARRAY, value)
        elif isinstance(value, dict):
            for number, (key, each) in enumerate(value.items()):
                part = str(key) if isinstance(key, _PLAIN) else f"({type(key).__name__} {number})"
                self.visit(f"{name}.{part}" if name else part, each, depth + 1)
        elif isinstance(value, list | tuple):
            if all(isinstance(each, _PLAIN) for each in value):
                self._visited += len(value)
                self.facts[name] = list(value)
            else:
                for number, each in enumerate(value):
                    self.visit(f"{name}.{number}" if name else str(number), each, depth + 1)
        elif isinstance(value, _PLAIN):
            self.facts[name] = value
        elif isinstance(value, bytes | bytearray):
            self.facts[name] = f"{len(value)} bytes"
        else:
            self.facts[name] = f"a {type(value).__name__}"

    def _tensor(self, name: str, tensor: Tensor) -> None:
        import torch  # noqa: PLC0415

        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.ndim > DIMENSIONS_MAX:
            raise UnreadablePayloadError(f"holds a tensor {name[:80]!r} that no schema can name; {_SAVE}")
        storage = tensor.untyped_storage()
        values_at = getattr(storage, "_checkpoint_offset", None)
        if values_at is None:
            raise UnreadablePayloadError(f"holds a tensor {name[:80]!r} without values; {_SAVE}")
        self.arrays.append(
            ArrayInfo(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.storage_offset() * tensor.element_size(),
                tensor.nelement() * tensor.element_size(),
                strided=not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg(),
                member_at=self._member(name, values_at, storage.nbytes()) if storage.nbytes() else None,
            )
        )

    def _member(self, name: str, values_at: int, size: int) -> int:
        """The local header of a storage, which stands before its values.

        Not at a known distance: an excerpt may lack the header, and with it the length of its name.
        """
        at = bisect.bisect_right(self._headers, values_at) - 1
        if at < 0 or self._members[self._headers[at]] != size:
            raise UnreadablePayloadError(f"has other bytes for the tensor {name[:80]!r} than its description says")
        self.unused.discard(self._headers[at])
        return self._headers[at]
