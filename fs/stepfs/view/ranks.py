"""The map from ranks to slices.

Tensor- and pipeline-parallel peers read the same batch, so several ranks of a world map to one slice; in the view
their files are hard links, hence one fetch and one page cache. There are two ways to give the map: `--world N`, where
consecutive ranks share a slice, and `--mesh pp=2,dp=4,tp=2`, the trainer's own device mesh (`format/grid/mesh.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepfs.errors import RefusedError, UsageError
from stepfs.format.grid.mesh import parse_mesh
from stepfs.format.grid.record import Grid
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


def rank_map(grid: Grid, *, world: int | None = None, mesh: str | None = None) -> RankMap:
    """Map ranks to slices; `UsageError` for a world that the lake's grid cannot serve, naming both numbers."""
    if grid.ranks * grid.cp != grid.slices:
        raise RefusedError(
            f"this lake has {grid}; this stepfs shows lakes of one file a rank: read it with a newer one"
        )
    if mesh is not None:
        mapped = _from_mesh(grid, mesh)
        if world not in {None, mapped.world}:
            raise UsageError(
                f"--world {world} contradicts --mesh {mesh}, which has {mapped.world} ranks: drop one"
            )
        return mapped
    size = grid.slices if world is None else world
    if not 0 < size <= RANK_MAX + 1 or size % grid.slices:
        raise UsageError(
            f"--world {size} does not fit this lake's {grid}: use a multiple of {grid.slices},"
            " or produce a lake with another --slices"
        )
    return RankMap(grid.slices, size)


def _from_mesh(grid: Grid, text: str) -> RankMap:
    try:
        mesh = parse_mesh(text)
    except ValueError as error:
        raise UsageError(f"--mesh {text}: {error}") from error
    if mesh.data_ranks != grid.ranks:
        raise UsageError(
            f"--mesh {mesh}: its data dimensions have {mesh.data_ranks} ranks, this lake is of {grid.ranks}; they must be"
            f" equal (cp, tp, pp, ep and others are peers, which read the same file)"
        )
    if grid.cp > 1 and mesh.context_ranks != grid.cp:
        raise UsageError(
            f"--mesh {mesh}: cp has {mesh.context_ranks} ranks, and this lake's sequences are cut for cp={grid.cp}; they"
            " must be equal"
        )
    pieces = grid.cp > 1  # else the context-parallel ranks are peers
    table = (grid.slice_of(data, piece=context * pieces) for data, context in mesh.readers())
    return RankMap(grid.slices, mesh.world, tuple(table))
