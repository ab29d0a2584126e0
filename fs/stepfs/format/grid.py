"""The grid of a lake: which slice is which file of which micro-batch of which data rank.

A trainer reads the ranks, so numbers that happen to fit must not decide: a lake cut for context parallelism and one of
as many data ranks have equally many slices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stepfs.errors import CorruptError
from stepfs.format.ids import SLICES_MAX, SliceIndex

if TYPE_CHECKING:
    from stepfs.format.codec import Fields, Value

_FILE: Final = re.compile(r"([a-z][a-z0-9_]{0,31})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Grid:
    """Data ranks × micro-batches of each × pieces for its context-parallel ranks × files of each piece.

    `cp` is 1 unless the lake's producers cut sequences themselves. `files` are the names behind the rank's, "" for none.
    """

    ranks: int
    micro: int = 1
    cp: int = 1
    files: tuple[str, ...] = ("",)

    @property
    def slices(self) -> int:
        return self.ranks * self.micro * self.cp * len(self.files)

    @property
    def units(self) -> int:
        """The micro-batches of a step: the units that data ranks, of any number, divide among themselves."""
        return self.ranks * self.micro

    def slice_of(self, unit: int, piece: int = 0, file: int = 0) -> SliceIndex:
        """The number of a slice. Micro-batch m of rank r is unit r · micro + m; its files are next to each other."""
        assert 0 <= unit < self.units
        assert 0 <= piece < self.cp
        assert 0 <= file < len(self.files)
        return SliceIndex((unit * self.cp + piece) * len(self.files) + file)

    def place_of(self, index: SliceIndex) -> tuple[int, int, int]:
        """Unit, piece and file of a slice: the inverse of `slice_of`."""
        rest, file = divmod(index, len(self.files))
        return (*divmod(rest, self.cp), file)

    def document(self) -> dict[str, Value]:
        """The form that `lake.msgpack` and JSON documents hold."""
        return {"ranks": self.ranks, "micro": self.micro, "cp": self.cp, "files": list(self.files)}

    def __str__(self) -> str:
        """`4 slices`, and their meaning where they are not one for each rank."""
        counts = (("micro-batches", self.micro), ("cp", self.cp), ("files", len(self.files)))
        factors = "".join(f" × {what} {count}" for what, count in counts if count > 1)
        slices = f"{self.slices} slice" + "s" * (self.slices != 1)
        return f"{slices} (ranks {self.ranks}{factors})" if factors else slices


def decode_grid(fields: Fields, slices: int, what: str) -> Grid:
    """The grid of `slices` slices; `CorruptError` if it has another number of them."""
    ranks, micro, cp = (fields.integer(name, low=1, high=SLICES_MAX) for name in ("ranks", "micro", "cp"))
    files = tuple(fields.texts("files", items_max=SLICES_MAX))
    if len(set(files)) != len(files) or not all(map(_FILE.fullmatch, files)):
        raise fields.bad("files", "different names of files")
    grid = Grid(ranks, micro, cp, files)
    if grid.slices != slices:
        raise CorruptError(f"{what}: its grid has {grid.slices} slices, it says {slices}")
    return grid
