"""One JPEG to one training sample: random crop, resized to 224 × 224, flipped half of the time; uint8, channels first."""

from __future__ import annotations

import random
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

EDGE = 224


def augmented(file: Path | IO[bytes], number: int) -> torch.Tensor:
    """The sample `number`, which seeds its crop and its flip: every process makes the same of it."""
    draw = random.Random(number)
    with Image.open(file) as image:
        width, height = image.size
        side = draw.uniform(0.5, 1.0) * min(width, height)
        left, top = draw.uniform(0, width - side), draw.uniform(0, height - side)
        box = (left, top, left + side, top + side)
        cropped = image.convert("RGB").resize((EDGE, EDGE), Image.Resampling.BILINEAR, box=box)
    pixels: NDArray[np.uint8] = np.asarray(cropped)
    if draw.random() < 0.5:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
