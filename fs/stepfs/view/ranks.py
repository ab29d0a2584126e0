"""The map from ranks to slices.

Tensor- and pipeline-parallel peers read the same batch, so several ranks of a world map to one slice; in the view
their files are hard links, hence one fetch and one page cache. There are two ways to give the map: `--world N`, where
consecutive ranks share a slice, and `--mesh pp=2,dp=4,tp=2`, the trainer's own device mesh, slowest dimension first, in
which only the data (`dp`, `dp_…`, `fsdp`, `ddp`) and context (`cp`) dimensions choose the slice.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from stepfs.errors import UsageError
from stepfs.format.ids import SliceIndex
from stepfs.view.naming import RANK_MAX

_DIMENSION = re.compile(r"([a-z][a-z0-9_]*)=([1-9][0-9]{0,6})")
_DATA_DIMENSION = re.compile(r"(dp|fsdp|ddp|hsdp|cp)(_[a-z0-9_]+)?")


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


def _from_mesh(slices: int, mesh: str) -> RankMap:
    dimensions: list[tuple[str, int]] = []
    for item in mesh.split(","):
        match = _DIMENSION.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"--mesh {mesh!r}: write it as pp=2,dp=4,tp=2, slowest dimension first")
        dimensions.append((match[1], int(match[2])))
    if len({name for name, _ in dimensions}) != len(dimensions):
        raise UsageError(f"--mesh {mesh!r}: a dimension is named twice")
    readers = math.prod(size for name, size in dimensions if _DATA_DIMENSION.fullmatch(name))
    world = math.prod(size for _, size in dimensions)
    if readers != slices or world > RANK_MAX + 1:
        raise UsageError(
            f"--mesh {mesh}: its data dimensions (dp, fsdp, cp …) have {readers} coordinates,"
            f" this lake has {slices} slices; they must be equal"
        )
    table = []
    for rank in range(world):
        rest, index, stride = rank, 0, 1
        for name, size in reversed(dimensions):
            rest, coordinate = divmod(rest, size)
            if _DATA_DIMENSION.fullmatch(name):
                index += coordinate * stride
                stride *= size
        table.append(SliceIndex(index))
    return RankMap(slices, world, tuple(table))
