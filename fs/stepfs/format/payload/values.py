"""The first values of an array, as plain numbers, from its bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from stepfs.format.payload.arrays import ArrayInfo
from stepfs.format.payload.dtypes import DTYPE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

Number = bool | int | float | str
LOCAL_HEADER_BYTES: Final = 30
_NAME_AND_EXTRA: Final = 26  # where a local header of a zip has their lengths


def values_bytes(array: ArrayInfo, count: int) -> int | None:
    """How many bytes the first `count` values take; None if they cannot be shown."""
    item = DTYPE_BYTES.get(array.dtype)
    if item is None or array.strided or array.dtype.startswith("float8"):
        return None
    return min(count * item, array.nbytes)


def member_values_at(local_header: bytes) -> int:
    """Where the contents of a zip's member begin, from the beginning of its local header."""
    name, extra = local_header[_NAME_AND_EXTRA : _NAME_AND_EXTRA + 2], local_header[_NAME_AND_EXTRA + 2 :]
    return LOCAL_HEADER_BYTES + int.from_bytes(name, "little") + int.from_bytes(extra[:2], "little")


def decode(dtype: str, data: bytes) -> NDArray[Any]:
    """Little-endian values of a dtype that `values_bytes` accepts."""
    import numpy as np  # noqa: PLC0415  (100 ms, for one command)

    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def plain(values: NDArray[Any]) -> list[Number]:
    """For JSON: nan, inf and complex numbers as text, because it has no numbers for them."""
    return [value if _is_json(value) else str(value) for value in values.tolist()]


def _is_json(value: object) -> bool:
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
