"""A dict of tensors as the bytes of a `.pt` file, without torch; `torch.load` reads it, mapped and with `weights_only` too.

A `.pt` is a zip of uncompressed members: a pickle that describes tensors by storage, offset, shape and strides, and the
values of each storage (`stepfs.format.payload.torch_pickle` reads it). torch takes two seconds and 200 MB to import, in
each of the many processes that only write. And its bytes change with its version, while the bytes of a planned step are
a function of the plan alone.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_STORAGES: Final = MappingProxyType({np.dtype("<i8"): b"Long", np.dtype("<i4"): b"Int"})
_ALIGNMENT: Final = 64  # of values, as torch aligns them: mapped tensors are read in place
_LOCAL_HEADER_BYTES: Final = 30
_PADDING: Final = b"FB"  # torch's own tag for it
_TAG_BYTES: Final = 4  # tag and length


def torch_bytes(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, object]) -> bytes:
    """What `torch.save` would make of a dict of tensors (int32, int64), then of plain values.

    The same bytes for the same values, in any process and for any version of torch.
    """
    dense = [np.asarray(array, order="C") for array in arrays.values()]
    items = [
        _plain(name) + _tensor(key, array)
        for key, (name, array) in enumerate(zip(arrays, dense, strict=True))
    ]
    items += [_plain(name) + _plain(value) for name, value in facts.items()]
    description = b"".join(
        [pickle.PROTO, b"\2", pickle.EMPTY_DICT, pickle.MARK, *items, pickle.SETITEMS, pickle.STOP]
    )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        _add(archive, file, "data.pkl", description)
        _add(archive, file, "byteorder", b"little")
        for key, array in enumerate(dense):
            _add(archive, file, f"data/{key}", array.data.cast("B") if array.size else b"")
        _add(archive, file, "version", b"3\n")
    return file.getvalue()


def _plain(value: object) -> bytes:
    """The opcodes that push a plain value. Without a memo, because with one the bytes depend on which values are one object."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]  # less protocol and STOP


def _tensor(key: int, array: NDArray[Any]) -> bytes:
    """`_rebuild_tensor_v2(storage, 0, shape, strides, requires_grad=False, OrderedDict())`."""
    storage = [
        _plain("storage"),
        b"ctorch\n",
        _STORAGES[array.dtype],
        b"Storage\n",
        *map(_plain, (str(key), "cpu", array.size)),
    ]
    strides = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
    arguments = [
        *(pickle.MARK, *storage, pickle.TUPLE, pickle.BINPERSID),
        *map(_plain, (0, array.shape, strides)),
        *(pickle.NEWFALSE, b"ccollections\nOrderedDict\n", pickle.EMPTY_TUPLE, pickle.REDUCE),
    ]
    return b"".join(
        [b"ctorch._utils\n_rebuild_tensor_v2\n", pickle.MARK, *arguments, pickle.TUPLE, pickle.REDUCE]
    )


def _add(archive: zipfile.ZipFile, file: io.BytesIO, name: str, data: bytes | memoryview) -> None:
    member = zipfile.ZipInfo(f"archive/{name}")  # dated 1980: the same values are the same bytes
    begin = file.tell() + _LOCAL_HEADER_BYTES + len(member.filename) + _TAG_BYTES
    padding = -begin % _ALIGNMENT
    member.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    archive.writestr(member, data)
