"""Payload → item of a data set, by the lake's extension."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from stepfs.torch import need, need_torch

Decode = Callable[[memoryview], Any]


def decoder(ext: str) -> Decode:
    """The decoder of an extension, `bytes` for others. `MissingPackageError` without the package that it needs."""
    if ext == ".pt":
        need_torch("decoding .pt files")
    if ext == ".safetensors":
        need("safetensors", "text", "decoding .safetensors files")
    return {".pt": _load_torch, ".npy": _load_numpy, ".safetensors": _load_safetensors}.get(ext, bytes)


def _load_torch(payload: memoryview) -> Any:
    import torch  # noqa: PLC0415 - heavy

    return torch.load(io.BytesIO(payload))


def _load_numpy(payload: memoryview) -> Any:
    import numpy as np  # noqa: PLC0415 - heavy

    return np.load(io.BytesIO(payload))


def _load_safetensors(payload: memoryview) -> Any:
    from safetensors.torch import load  # noqa: PLC0415 - heavy, and of the extra `text`

    return load(bytes(payload))
