"""What of a file is a fragment."""

from __future__ import annotations

from enum import Enum


class Unit(Enum):
    """What of a file is read at once."""

    RANGES = "byte ranges"
    PARTS = "parts, as listed"
    WHOLE = "the file, whose decoded size is unknown"
    NONE = "nothing: it belongs to another file"
