"""`.pt` files in memory, by `torch.save` and `torch.load`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepfs.torch.need import need_torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def dump(obj: object) -> bytes:
    """An object as the bytes of a `.pt` file: uncompressed, so `torch.load(path, mmap=True)` maps its tensors.

    `MissingPackageError` if torch is not installed.
    """
    need_torch("stepfs.torch.dump")
    import torch  # noqa: PLC0415 (optional, and heavy)

    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def load(payload: bytes | bytearray | memoryview, device: str) -> object:
    """The object of a `.pt` file that anybody may have written; on the device "meta" its tensors have no values.

    `ValueError` for another file, `MissingPackageError` without a torch that runs no code of it.
    """
    need_torch("looking into .pt files", for_foreign_files=True)
    import torch  # noqa: PLC0415 (optional, and heavy)

    try:
        return torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
    except Exception as error:  # torch raises whatever hostile bytes lead it to
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]  # without its advice to unpickle with code
        raise ValueError(reason.strip().partition("\n")[0].partition(". ")[0]) from error


def torch_bytes(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, object]) -> bytes:
    """A dict of tensors, then of plain values (those of JSON).

    The same bytes for the same values, in any process with the same torch: a pickle names an object that it has
    written before instead of repeating it, so facts are copied first, which makes equal objects distinct ones.
    """
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    tensors = {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}
    return dump({**tensors, **json.loads(json.dumps(facts))})
