"""The dtypes that a schema can name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

DTYPE_BYTES: Final = MappingProxyType(
    {
        "bool": 1,
        **dict.fromkeys(("int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
        **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
        **dict.fromkeys(("int32", "uint32", "float32"), 4),
        **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
        "complex128": 16,
    }
)
UNKNOWN_DTYPES: Final = MappingProxyType(  # those that no file of a format has
    {
        "npy": frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"}),
        "safetensors": frozenset({"complex128"}),
    }
)
