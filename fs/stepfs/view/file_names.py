"""The names of a step's files: `rank-00003.pt`, and of a rank with several `rank-00003.micro-0000.pixels.pt`.

One directory holds them all, so a rank that sorts its own names has them in the order in which it accumulates. A name
tells the reader of a file, which differs from mesh to mesh; the inode says which slice it is, and that never does.
"""

from __future__ import annotations

from typing import Final

from stepfs.format.ids import SliceIndex
from stepfs.format.records import LakeIdentity
from stepfs.view.names import parse_rank, rank_name
from stepfs.view.ranks import RankMap, rank_map

_MICRO_DIGITS: Final = 4


class FileNames:
    """Names ↔ slices, the same for every step of a mount. Its length is the number of names."""

    def __init__(self, ranks: RankMap, ext: str) -> None:
        self.ranks = ranks
        digits = max(_MICRO_DIGITS, len(str(ranks.micro_batches - 1)))  # so that they sort as numbers
        micros = [b".micro-%0*d" % (digits, micro) for micro in range(ranks.micro_batches)]
        files = [b".%b" % file.encode() if file else b"" for file in ranks.grid.files]
        self._rests = [
            micro + file + ext.encode() for micro in (micros if len(micros) > 1 else [b""]) for file in files
        ]  # behind the rank
        self._numbers = {rest: number for number, rest in enumerate(self._rests)}

    def __len__(self) -> int:
        return self.ranks.world * len(self._rests)

    def __getitem__(self, place: int) -> tuple[bytes, SliceIndex]:
        """The name at a place of the listing, and its slice: rank by rank, then as the rank accumulates them."""
        rank, number = divmod(place, len(self._rests))
        return rank_name(rank, self._rests[number]), self._slice(rank, number)

    def slice_of(self, name: bytes) -> SliceIndex | None:
        """The slice of a name; None for a name that no file has."""
        parsed = parse_rank(name)
        if parsed is None:
            return None
        rank, number = parsed[0], self._numbers.get(parsed[1])
        return self._slice(rank, number) if number is not None and rank < self.ranks.world else None

    def of_rank(self, rank: int, micro: int, file: int) -> bytes:
        """The name of one of a rank's files of a micro-batch."""
        return rank_name(rank, self._rests[micro * len(self.ranks.grid.files) + file])

    def name_of(self, index: SliceIndex) -> bytes:
        """The name of a slice for the lowest rank that reads it."""
        return self.of_rank(*self.ranks.reader_of(index))

    def _slice(self, rank: int, number: int) -> SliceIndex:
        return self.ranks.slice_of(rank, *divmod(number, len(self.ranks.grid.files)))


def names_of(identity: LakeIdentity) -> FileNames:
    """The names in a mount without `--world` and `--mesh`."""
    return FileNames(rank_map(identity.grid), identity.ext)
