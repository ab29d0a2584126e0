"""Images → patches of uint8, by Pillow: the only module that imports it (`stepfs[images]`).

An image is made upright and opaque, resized to whole groups of patches, and cut. Decoding happens here and not in trainers,
who have no cores for it; normalising is left to them, since it makes four bytes of one. Pillow resizes bytes in integers, so
the same version gives the same patches everywhere; another one may not: its version is part of the source's identity.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import MissingPackageError
from stepfs_producer.plan.sources import Images
from stepfs_producer.transforms.documents import UnfitRecordError

# To be loaded before the first task: half a second.
MODULES: Final = (
    "PIL.Image", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin",
)  # fmt: skip
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
_OTHERS: Final = {
    b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"<svg": "SVG", b"<?xml": "XML", b"<!DOCTYPE": "HTML",
    b"<html": "HTML", b"\x1f\x8b": "gzip", b"PK\3\4": "zip",
}  # fmt: skip  # by their first bytes
_ADDRESS: Final = re.compile(r" ?<[^<>]* at 0x[0-9a-f]+>")
_WHITE: Final = (255, 255, 255)
_ORIENTATION: Final = 0x0112  # of EXIF
_UPRIGHT: Final = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_REASON_CHARACTERS_MAX: Final = 120
_RATIO_MAX: Final = 200  # of the sides of a chat's image


@dataclass(frozen=True, slots=True)
class Image:
    """A decoded image. Its patches are in the order of groups of merge × merge, row by row, and so within a group."""

    pixels: NDArray[np.uint8]  # [patches, patch · patch · 3]: rows of a patch from the top, RGB
    grid: NDArray[np.int32]  # [1, 3]: 1, rows of patches, patches of a row


def need_pillow() -> bool:
    """True; `MissingPackageError` without the library that decodes."""
    if find_spec("PIL") is None:
        raise MissingPackageError("images need the package pillow: pip install 'stepfs[images]'")
    return True


def with_images(record: Mapping[str, Any], settings: Images, *, of_chat: bool = False) -> dict[str, Any]:
    """The record with decoded images in its fields. `UnfitRecordError` for one that cannot be decoded."""
    found = dict(record)
    for name in settings.fields:
        if (value := record.get(name)) is not None:
            several = isinstance(value, list)
            images = [
                _decoded(one, settings, f"{name}[{index}]" if several else name, size_for_chats if of_chat else size_of)
                for index, one in enumerate(value if several else [value])
            ]
            found[name] = images if several else images[0]
    return found


def size_of(width: int, height: int, settings: Images) -> tuple[int, int]:
    """The size to which an image is resized: the nearest whole groups of patches, within `patches_max`."""
    side = settings.patch * settings.merge
    columns, rows = ((2 * size + side) // (2 * side) or 1 for size in (width, height))
    most = settings.patches_max // settings.merge**2
    if columns * rows > most:
        # Floors of columns · √(most / area), so the product is at most `most`, or one is 1.
        area = width * height
        columns = max(math.isqrt(most * width * width // area), 1)
        rows = max(math.isqrt(most * height * height // area), 1)
        columns, rows = min(columns, most // rows), min(rows, most // columns)
    return max(columns, 1) * side, max(rows, 1) * side


def size_for_chats(width: int, height: int, settings: Images) -> tuple[int, int]:
    """The same as the processor of Qwen2-VL has it, which rounds halves to even sizes, and makes small images larger.
    `UnfitRecordError` for a size that it refuses.
    """
    if max(width, height) / min(width, height) > _RATIO_MAX:
        raise UnfitRecordError(f"an image of {width} × {height} pixels; the model's processor takes at most 200 : 1")
    side = settings.patch * settings.merge
    columns, rows = round(width / side), round(height / side)
    most, least = (count * settings.patch**2 for count in (settings.patches_max, settings.patches_min or 1))
    if columns * rows * side**2 > most:
        factor = math.sqrt(width * height / most)
        columns, rows = (max(math.floor(size / factor / side), 1) for size in (width, height))
    elif columns * rows * side**2 < least:
        factor = math.sqrt(least / (width * height))
        columns, rows = (math.ceil(size * factor / side) for size in (width, height))
    return columns * side, rows * side


def columns_of(images: Sequence[Image]) -> dict[str, NDArray[Any]]:
    """The rows of a chat's images; none without one."""
    names = ("pixels", "grid") if images else ()
    return {name: np.concatenate([getattr(one, name) for one in images]) for name in names}


def _decoded(value: object, settings: Images, name: str, size: Callable[[int, int, Images], tuple[int, int]]) -> Image:
    if isinstance(value, Mapping):  # as Hugging Face's datasets store it: {bytes, path}
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise UnfitRecordError(f"the field {name} holds {type(value).__name__}, not the bytes of an image")
    from PIL import Image as Pillow  # noqa: PLC0415 (optional, and slow)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Pillow.DecompressionBombWarning)  # up to twice its limit, Pillow only warns
            with Pillow.open(io.BytesIO(value), formats=_FORMATS) as opened:
                if 0 in opened.size:
                    raise ValueError(f"{opened.width} × {opened.height} pixels")  # noqa: TRY301
                upright = _opaque(_upright(opened), settings.background or _WHITE)
        width, height = upright.size
        image = upright.resize(size(width, height, settings), Pillow.Resampling.BICUBIC)
    except (MemoryError, UnfitRecordError):
        raise
    except Exception as error:  # Pillow raises anything, OSError too: nothing but these bytes was read
        reason = _ADDRESS.sub("", " ".join(str(error).split()))[:_REASON_CHARACTERS_MAX]
        other = next((kind for begin, kind in _OTHERS.items() if value.startswith(begin)), None)
        reason = reason if other is None else f"it is {other}"
        raise UnfitRecordError(f"the field {name} holds no readable JPEG, PNG, WebP or GIF ({reason})") from error
    return _patches(np.asarray(image, np.uint8), settings)


def _upright(image: Any) -> Any:
    """As its EXIF says that it is looked at; as it is stored, where that cannot be read. The EXIF itself is not kept:
    Pillow's own `exif_transpose` writes it anew, and fails at what it could not write.
    """
    from PIL import Image as Pillow  # noqa: PLC0415 (optional, and slow)

    image.load()
    try:
        way = _UPRIGHT.get(image.getexif().get(_ORIENTATION))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - Pillow raises anything
        way = None
    return image if way is None else image.transpose(Pillow.Transpose[way])


def _opaque(image: Any, background: tuple[int, ...]) -> Any:
    """In RGB: of 16 bits the upper ones, on the background where it is transparent; of an animation the first frame."""
    from PIL import Image as Pillow  # noqa: PLC0415 (optional, and slow)

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        grey = np.repeat((values * 255 + 32767)[:, :, None] // 65535, 3, axis=2).astype(np.uint8)
        grey[values == image.info.get("transparency", -1)] = background
        return Pillow.fromarray(grey)
    if not image.has_transparency_data:
        return image.convert("RGB")
    below = Pillow.new("RGBA", image.size, (*background, 255))
    return Pillow.alpha_composite(below, image.convert("RGBA")).convert("RGB")


def _patches(image: NDArray[np.uint8], settings: Images) -> Image:
    patch, merge = settings.patch, settings.merge
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    cut = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    ordered = cut.transpose(0, 3, 1, 4, 2, 5, 6)  # groups, patches in them, then pixels
    pixels = np.ascontiguousarray(ordered).reshape(rows * columns, patch * patch * 3)
    return Image(pixels, np.array([[1, rows, columns]], np.int32))
