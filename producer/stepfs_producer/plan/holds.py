"""What each kind of file holds of a step beside its token ids: the one table, asked by each feature of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

IDS_ALONE: Final = (
    ".bin"  # no kind of files of plans: only `stepfs-produce text` makes it, whose documents need no more
)


class Part(StrEnum):
    """A part of a file; its value ends the sentence "… files have no …"."""

    LABELS = "labels, which say what is learned"
    SPANS = "spans, which say of which answer a document is"
    COLUMNS = "room for columns"
    COMPACT = "compact arrays"
    TAGS = "room for tags"
    ENCODED = "images that a reader decodes"


HOLDS: Final[Mapping[str, frozenset[Part]]] = {
    ".safetensors": frozenset(Part),
    ".npy": frozenset({Part.LABELS}),
    ".pt": frozenset(Part),
    ".tar": frozenset(Part) - {Part.COMPACT, Part.ENCODED},
    IDS_ALONE: frozenset(),
}


def lack(ext: str, part: Part) -> str | None:
    """The sentence that refuses files without a part, with those that have it; None if `ext` holds it."""
    if part in HOLDS[ext]:
        return None
    *others, last = (name for name, parts in HOLDS.items() if part in parts)
    return f"{ext} files have no {part}; choose {', '.join(others)} or {last}"
