"""JPEG and PNG → patches of uint8, by Pillow: the only module that imports it (`stepfs[images]`).

An image is made upright, resized to whole groups of patches, and cut. Decoding happens here and not in trainers, who
have no cores for it; normalising is left to them, since it makes four bytes of one. All sizes are integers, and Pillow
resizes bytes in integers, so the same version gives the same patches everywhere; another one may not, so its version
is part of the source's identity.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import MissingPackageError
from stepfs_producer.transforms.documents import ImagesSpec, UnfitRecordError

# To be loaded before the first task: half a second.
MODULES: Final = ("PIL.ImageOps", "PIL.JpegImagePlugin", "PIL.PngImagePlugin")
_FORMATS: Final = ("JPEG", "PNG")
_REASON_CHARACTERS_MAX: Final = 120


@dataclass(frozen=True, slots=True)
class Image:
    """A decoded image. Its patches are in the order of groups of merge × merge, row by row, and so within a group."""

    pixels: NDArray[np.uint8]  # [patches, patch · patch · 3]: rows of a patch from the top, RGB
    grid: NDArray[np.int32]  # [1, 3]: 1, rows of patches, patches of a row


def library() -> str:
    """The decoding library: part of the identity of a source with images. `MissingPackageError` without it."""
    if find_spec("PIL") is None:
        raise MissingPackageError("images need the package pillow: pip install 'stepfs[images]'")
    import PIL  # noqa: PLC0415 (optional, and slow)
    from PIL import features  # noqa: PLC0415

    return f"pillow-{PIL.__version__}, jpeg-{features.version_codec('jpg')}"


def with_images(record: Mapping[str, Any], spec: ImagesSpec) -> dict[str, Any]:
    """The record with decoded images in its fields. `UnfitRecordError` for one that cannot be decoded."""
    found = dict(record)
    for name in spec.fields:
        if (value := record.get(name)) is not None:
            several = isinstance(value, list)
            images = [
                _decoded(one, spec, f"{name}[{index}]" if several else name)
                for index, one in enumerate(value if several else [value])
            ]
            found[name] = images if several else images[0]
    return found


def size_of(width: int, height: int, spec: ImagesSpec) -> tuple[int, int]:
    """The size to which an image is resized: the nearest whole groups of patches, within `patches_max`."""
    side = spec.patch * spec.merge
    columns, rows = ((2 * size + side) // (2 * side) or 1 for size in (width, height))
    most = spec.patches_max // spec.merge**2
    if columns * rows > most:
        # Floors of columns · √(most / area), so the product is at most `most`, or one is 1.
        area = width * height
        columns = max(math.isqrt(most * width * width // area), 1)
        rows = max(math.isqrt(most * height * height // area), 1)
        columns, rows = min(columns, most // rows), min(rows, most // columns)
    return max(columns, 1) * side, max(rows, 1) * side


def _decoded(value: object, spec: ImagesSpec, name: str) -> Image:
    if isinstance(value, Mapping):  # as Hugging Face's datasets store it: {bytes, path}
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise UnfitRecordError(f"the field {name} holds {type(value).__name__}, not the bytes of an image")
    from PIL import Image as Pillow  # noqa: PLC0415 (optional, and slow)
    from PIL import ImageOps  # noqa: PLC0415

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a bomb, Pillow only warns up to twice its limit
            with Pillow.open(io.BytesIO(value), formats=_FORMATS) as opened:
                if 0 in opened.size:
                    raise ValueError(f"{opened.width} × {opened.height} pixels")  # noqa: TRY301
                upright = ImageOps.exif_transpose(opened).convert("RGB")
        image = upright.resize(size_of(*upright.size, spec), Pillow.Resampling.BICUBIC)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises anything, OSError too: nothing but these bytes was read
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX]
        raise UnfitRecordError(f"the field {name} holds no readable JPEG or PNG ({reason})") from error
    return _patches(np.asarray(image, np.uint8), spec)


def _patches(image: NDArray[np.uint8], spec: ImagesSpec) -> Image:
    patch, merge = spec.patch, spec.merge
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    cut = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    ordered = cut.transpose(0, 3, 1, 4, 2, 5, 6)  # groups, patches in them, then pixels
    pixels = np.ascontiguousarray(ordered).reshape(rows * columns, patch * patch * 3)
    return Image(pixels, np.array([[1, rows, columns]], np.int32))
