"""The map from ranks to slices.

Tensor- and pipeline-parallel peers read the same batch, so several ranks of a world map to one slice; in the view
their files are hard links, hence one fetch and one page cache. There are two ways to give the map: `--world N`, where
consecutive ranks share a slice, and `--mesh pp=2,dp=4,tp=2`, the trainer's own device mesh (`format/grid/mesh.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepfs.errors import UsageError
from stepfs.format.grid.mesh import parse_mesh
from stepfs.format.ids import SliceIndex
from stepfs.view.naming import RANK_MAX


@dataclass(frozen=True, slots=True)
class RankMap:
    """World size, and the slice of each rank when it is not simply `rank // (world // slices)`."""

    slices: int
    world: int
    table: tuple[SliceIndex, ...] | None = field(default=None, repr=False)

    def slice_of(self, rank: int) -> SliceIndex:
        """The slice that rank reads, 0 ≤ rank < world."""
        assert 0 <= rank < self.world
        return SliceIndex(rank // self.links) if self.table is None else self.table[rank]

    def first_rank_of(self, index: SliceIndex) -> int:
        """The lowest rank that reads a slice: the mount itself looks the file up under this name."""
        return index * self.links if self.table is None else self.table.index(index)

    @property
    def links(self) -> int:
        """The number of ranks that read one slice: the link count of its file."""
        return self.world // self.slices


def rank_map(slices: int, *, world: int | None = None, mesh: str | None = None) -> RankMap:
    """Map ranks to slices; `UsageError` for a world that the lake's slices cannot serve, naming both numbers."""
    if mesh is not None:
        mapped = _from_mesh(slices, mesh)
        if world not in {None, mapped.world}:
            raise UsageError(
                f"--world {world} contradicts --mesh {mesh}, which has {mapped.world} ranks: drop one"
            )
        return mapped
    size = slices if world is None else world
    if not 0 < size <= RANK_MAX + 1 or size % slices:
        raise UsageError(
            f"--world {size} does not fit this lake's {slices} slices: use a multiple of {slices},"
            " or produce a lake with another --slices"
        )
    return RankMap(slices, size)


def _from_mesh(slices: int, text: str) -> RankMap:
    try:
        mesh = parse_mesh(text)
    except ValueError as error:
        raise UsageError(f"--mesh {text}: {error}") from error
    if mesh.data_ranks != slices:
        raise UsageError(
            f"--mesh {mesh}: its data dimensions have {mesh.data_ranks} ranks, this lake has {slices} slices; they must be"
            " equal (cp, tp, pp, ep and others are peers, which read the same file)"
        )
    return RankMap(slices, mesh.world, tuple(map(SliceIndex, mesh.readers())))
