"""How the reading side asks for records of a plan's sources: of whoever knows the formats of corpora."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepfs.format.planned.listing import Listing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RecordPart:
    """Tokens of a record, as a step holds them."""

    source: str
    epoch: int
    file: int  # number in the listing
    record: int  # its place in the file
    first: int  # token of the record
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NoText:
    """Why the text of a record is not at hand, in a line."""

    why: str


# Plan text, listings of its sources, parts, directory of the plan's file → the record of each part, whole.
# Never another text than the one that was tokenised: the answerer compares the tokens.
RecordTexts = Callable[[str, Mapping[str, Listing], Sequence[RecordPart], str], Sequence[str | NoText]]
