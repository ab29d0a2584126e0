"""Images of records → patches of uint8.

An image is made upright and opaque, resized to whole groups of patches, and cut. Decoding happens here and not in trainers,
who have no cores for it; normalising is left to them, since it makes four bytes of one. Pillow resizes bytes in integers, so
the same version gives the same patches everywhere; another one may not: its version is part of the source's identity.
With `decode: reader` an image is decoded here all the same, for its size and because a damaged one must not reach a trainer;
its bytes are kept in place of its patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs._internal import image_patches
from stepfs_producer.plan.sources import Images
from stepfs_producer.transforms.documents import UnfitRecordError

_WHITE: Final = (255, 255, 255)
_RATIO_MAX: Final = 200  # of the sides of a chat's image


@dataclass(frozen=True, slots=True)
class Image:
    """A decoded image. Its patches are in the order of groups of merge × merge, row by row, and so within a group."""

    pixels: NDArray[np.uint8]  # [patches, patch · patch · 3]: rows of a patch from the top, RGB
    grid: NDArray[np.int32]  # [1, 3]: 1, rows of patches, patches of a row
    data: bytes = b""  # as it was encoded, where a reader decodes it; then `pixels` are [patches, 0]
    how: tuple[int, ...] = ()  # patch, merge, background


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
    found: dict[str, NDArray[Any]] = {name: np.concatenate([getattr(one, name) for one in images]) for name in names}
    if images and images[0].how:
        found[image_patches.ENCODED] = np.frombuffer(b"".join(one.data for one in images), np.uint8)
        found[image_patches.ENCODED_AS] = np.array([(len(one.data), *one.how) for one in images], np.int32)
    return found


def _decoded(value: object, settings: Images, name: str, size: Callable[[int, int, Images], tuple[int, int]]) -> Image:
    if isinstance(value, Mapping):  # as Hugging Face's datasets store it: {bytes, path}
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise UnfitRecordError(f"the field {name} holds {type(value).__name__}, not the bytes of an image")
    background = settings.background or _WHITE
    try:
        image = image_patches.opened(value, background)
        width, height = size(image.width, image.height, settings)
        pixels = image_patches.cut(image, (width, height), settings.patch, settings.merge)
    except image_patches.UnreadableImageError as error:
        raise UnfitRecordError(f"the field {name} holds no readable JPEG, PNG, WebP or GIF ({error})") from error
    grid = np.array([[1, height // settings.patch, width // settings.patch]], np.int32)
    if settings.decode == "producer":
        return Image(pixels, grid)
    return Image(pixels[:, :0], grid, value, (settings.patch, settings.merge, *background))
