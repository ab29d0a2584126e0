"""Payloads of each format, and as a hostile writer changes them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from typing import Any

import numpy as np
import torch


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def safetensors(**arrays: np.ndarray) -> bytes:
    """As the library writes them; by hand, so that headers can be wrong."""
    codes = {"int64": "I64", "int32": "I32", "float32": "F32", "uint8": "U8", "bool": "BOOL", "uint16": "U16"}
    header, end = {}, 0
    for name, array in arrays.items():
        place = [end, end + array.nbytes]
        header[name] = {"dtype": codes[str(array.dtype)], "shape": list(array.shape), "data_offsets": place}
        end += array.nbytes
    return framed(header, b"".join(array.tobytes() for array in arrays.values()))


def framed(header: object, values: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def pt(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def zipped(pickled: bytes, *, compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """A zip like that of torch.save, around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in {"version": b"3", "byteorder": b"little", **members}.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


class Bomb:
    """Unpickled, it would run a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the bomb went off')",)


def bomb() -> bytes:
    return zipped(pickle.dumps({"a": Bomb()}, 2))
