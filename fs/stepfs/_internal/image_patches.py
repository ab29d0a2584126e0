"""Encoded images → patches of uint8, by Pillow: the only module that imports it (`stepfs[images]`).

Producers cut images so, and readers of files that hold them encoded (`images: {decode: reader}`): the same version of Pillow,
which resizes bytes in integers, gives the same patches in both places.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import CorruptError, MissingPackageError

# To be loaded before the first task: half a second.
MODULES: Final = (
    "PIL.Image", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin",
)  # fmt: skip
ENCODED: Final = "encoded"  # the array of a file: images end to end
ENCODED_AS: Final = "encoded_images"  # beside it, per image: its bytes, patch, merge, and its background as RGB
PIXELS: Final = "pixels"
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
_OTHERS: Final = {
    b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"<svg": "SVG", b"<?xml": "XML", b"<!DOCTYPE": "HTML",
    b"<html": "HTML", b"\x1f\x8b": "gzip", b"PK\3\4": "zip",
}  # fmt: skip  # by their first bytes
_ADDRESS: Final = re.compile(r" ?<[^<>]* at 0x[0-9a-f]+>")
_ORIENTATION: Final = 0x0112  # of EXIF
_UPRIGHT: Final = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_REASON_CHARACTERS_MAX: Final = 120


class UnreadableImageError(ValueError):
    """These bytes are no image that is read here; the message says why."""


def need_pillow() -> bool:
    """True; `MissingPackageError` without the library that decodes."""
    if find_spec("PIL") is None:
        raise MissingPackageError("images need the package pillow: pip install 'stepfs[images]'")
    return True


def opened(data: bytes, background: tuple[int, ...]) -> Any:
    """Pillow's image, upright and opaque. `UnreadableImageError`."""
    from PIL import Image as Pillow  # noqa: PLC0415 (optional, and slow)

    with _readable(data), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Pillow.DecompressionBombWarning)  # up to twice its limit, Pillow only warns
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
            if 0 in image.size:
                raise ValueError(f"{image.width} × {image.height} pixels")
            return _opaque(_upright(image), background)


def cut(image: Any, size: tuple[int, int], patch: int, merge: int) -> NDArray[np.uint8]:
    """An opened image, resized, as [patches, patch · patch · 3]: in groups of merge × merge, row by row, in each so."""
    from PIL import Image as Pillow  # noqa: PLC0415 (optional, and slow)

    with _readable(b""):
        found = np.asarray(image.resize(size, Pillow.Resampling.BICUBIC), np.uint8)
    rows, columns = found.shape[0] // patch, found.shape[1] // patch
    parted = found.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    ordered = parted.transpose(0, 3, 1, 4, 2, 5, 6)  # groups, patches in them, then pixels
    return np.ascontiguousarray(ordered).reshape(rows * columns, patch * patch * 3)


def holds_encoded(batch: object) -> bool:
    """Whether this is a decoded file of a plan with `images: {decode: reader}`."""
    if not isinstance(batch, Mapping) or not batch.keys() >= {PIXELS, "grid", ENCODED, ENCODED_AS}:
        return False
    return len(batch[PIXELS]) == 0 and batch[ENCODED_AS].shape[1:] == (6,)  # else columns of these names


def without_encoded(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with the patches of its images in their place, as a numpy array: that which the same plan writes without
    `decode: reader`.

    `MissingPackageError` without Pillow; `CorruptError` for an image that another Pillow took, and this one does not.
    """
    need_pillow()
    data, images, grids, pixels = (np.asarray(batch[name]) for name in (ENCODED, ENCODED_AS, "grid", PIXELS))
    found, end, whole = [pixels], 0, data.tobytes()
    for number, ((size, patch, merge, *background), (_, rows, columns)) in enumerate(
        zip(images.tolist(), grids.tolist(), strict=True)
    ):
        begin, end = end, end + size
        try:
            image = opened(whole[begin:end], tuple(background))
            found.append(cut(image, (columns * patch, rows * patch), patch, merge))
        except UnreadableImageError as error:
            raise CorruptError(
                f"image {number} of a batch cannot be decoded ({error}); install the Pillow of its producer"
            ) from error
    gone = {name + behind for name in (ENCODED, ENCODED_AS) for behind in ("", "_counts")}
    kept = {name: value for name, value in batch.items() if name not in gone}
    return kept | {PIXELS: np.concatenate(found)}


@contextmanager
def _readable(data: bytes) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises anything, OSError too: nothing but these bytes was read
        reason = _ADDRESS.sub("", " ".join(str(error).split()))[:_REASON_CHARACTERS_MAX]
        other = next((kind for begin, kind in _OTHERS.items() if data.startswith(begin)), None)
        raise UnreadableImageError(reason if other is None else f"it is {other}") from error


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
