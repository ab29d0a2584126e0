"""The map from ranks to slices.

A step is a row of units, its micro-batches. A trainer of D data ranks reads it in D equal runs, so the global batch is
the same for every D that divides the units; only the number of micro-batches that a rank accumulates differs.

Tensor- and pipeline-parallel peers read the same batch, so several ranks of a world map to one slice; in the view
their files are hard links, hence one fetch and one page cache. There are two ways to give the map: `--world N`, where
consecutive ranks are peers, and `--mesh pp=2,dp=4,tp=2`, the trainer's own device mesh (`format/mesh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepfs.errors import UsageError
from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex
from stepfs.format.mesh import Mesh, parse_mesh
from stepfs.view.naming import RANK_MAX

Spelling = Callable[[str, object], str]  # a word of the caller and its value, as errors write them


@dataclass(frozen=True, slots=True)
class RankMap:
    """Which ranks read which part of a step.

    Readers are data ranks × pieces of their sequences (`Grid.cp`); the ranks of one reader are peers.
    """

    grid: Grid
    data_ranks: int
    world: int
    table: tuple[int, ...] | None = field(default=None, repr=False)  # reader of each rank, unless consecutive

    def units_of(self, rank: int) -> range:
        """The units that a rank reads, in the order in which it accumulates them; 0 ≤ rank < world.

        Units at the ends are read by a neighbour, too, where the data ranks do not divide them: for readers that can split them.
        """
        data, units = self._reader(rank) // self.grid.cp, self.grid.units
        return range(data * units // self.data_ranks, -(-(data + 1) * units // self.data_ranks))

    def slice_of(self, rank: int, micro: int = 0, file: int = 0) -> SliceIndex:
        """The slice of a file of micro-batch `micro` of a rank."""
        return self.grid.slice_of(self.units_of(rank)[micro], self._reader(rank) % self.grid.cp, file)

    def slices_of(self, rank: int, files: Sequence[int] | None = None) -> list[SliceIndex]:
        """The slices that a rank reads, in order: of these files, by default of all."""
        files = range(len(self.grid.files)) if files is None else files
        return [self.slice_of(rank, micro, file) for micro in range(len(self.units_of(rank))) for file in files]

    def reader_of(self, index: SliceIndex) -> tuple[int, int, int]:
        """The lowest rank that reads a slice, and which of its micro-batches and their files it is.

        The mount itself looks the file up under this name.
        """
        unit, piece, file = self.grid.place_of(index)
        data, micro = divmod(unit, self.micro_batches)
        reader = data * self.grid.cp + piece
        return (reader * self.links if self.table is None else self.table.index(reader)), micro, file

    def data_rank_of(self, rank: int) -> int:
        return self._reader(rank) // self.grid.cp

    @property
    def micro_batches(self) -> int:
        """How many units each rank reads; with parts of files at the ends, how many the first rank does."""
        return -(-self.grid.units // self.data_ranks)

    @property
    def links(self) -> int:
        """The number of ranks that read one slice: the link count of its file."""
        return self.world // (self.data_ranks * self.grid.cp)

    def _reader(self, rank: int) -> int:
        assert 0 <= rank < self.world
        return rank // self.links if self.table is None else self.table[rank]


def as_option(word: str, value: object) -> str:
    """On the command line."""
    return f"--{word} {value}"


def as_keyword(word: str, value: object) -> str:
    """In Python."""
    return f"{word}={value!r}"


def rank_map(
    grid: Grid,
    *,
    world: int | None = None,
    mesh: str | None = None,
    splits: bool = False,
    spelt: Spelling = as_option,
) -> RankMap:
    """Map ranks to slices; `UsageError` for a world that the lake's grid cannot serve, naming both numbers.

    `splits`: the reader can take a part of a file that holds several micro-batches. `spelt`: how errors write a word of
    the caller, `--mesh dp=4` or `mesh='dp=4'`.
    """
    if mesh is not None:
        mapped = _from_mesh(grid, mesh, splits=splits and grid.micro == 1, spelt=spelt)
        if world not in {None, mapped.world}:
            raise UsageError(
                f"{spelt('world', world)} contradicts {spelt('mesh', mesh)}, which has {mapped.world} ranks: drop one"
            )
        return mapped
    readers = grid.ranks * grid.cp
    size = readers if world is None else world
    if not 0 < size <= RANK_MAX + 1 or size % readers:
        elastic = size > 0 and grid.cp == 1 and grid.units % size == 0
        way = f"{spelt('mesh', f'dp={size}')} for as many data ranks" if elastic else "produce a lake of other ranks"
        raise UsageError(
            f"{spelt('world', size)} does not fit this lake's {grid}: use a multiple of {readers}, or {way}"
        )
    return RankMap(grid, grid.ranks, size)


def _from_mesh(grid: Grid, text: str, *, splits: bool, spelt: Spelling) -> RankMap:
    try:
        mesh = parse_mesh(text)
    except ValueError as error:
        raise UsageError(f"{spelt('mesh', text)}: {error}") from error
    if grid.cp > 1 and mesh.context_ranks != grid.cp:
        raise UsageError(
            f"{spelt('mesh', text)}: cp has {mesh.context_ranks} ranks, and this lake's sequences are cut for cp={grid.cp}; they"
            " must be equal"
        )
    if not splits and grid.units % mesh.data_ranks:
        raise UsageError(f"{spelt('mesh', text)}: {_does_not_divide(grid, mesh)}")
    pieces = grid.cp > 1  # else the context-parallel ranks are peers
    table = (data * grid.cp + context * pieces for data, context in mesh.readers())
    return RankMap(grid, mesh.data_ranks, mesh.world, tuple(table))


def _does_not_divide(grid: Grid, mesh: Mesh) -> str:
    what = "ranks × micro-batches" if grid.micro > 1 else "ranks"
    peers = "cp, tp, pp, ep" if grid.cp == 1 else "tp, pp, ep"
    ways = (
        "" if grid.micro > 1 else
        ". If a file holds several micro-batches: plan with output.files: micro_batches, or read .safetensors"
        " and .pt with StepDataset(mesh=…)"
    )  # fmt: skip
    return (
        f"its data dimensions have {mesh.data_ranks} ranks, which do not divide the {grid.units} {what} of"
        f" this lake; {nearest_divisors(grid.units, mesh.data_ranks)} would ({peers} and others are peers, which"
        f" read the same files){ways}"
    )


def nearest_divisors(number: int, size: int) -> str:
    """The greatest divisor of `number` below `size` and the least above it, for people."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    near = [max((each for each in divisors if each < size), default=None)]
    near.append(min((each for each in divisors if each > size), default=None))
    return " and ".join(f"dp={each}" for each in near if each is not None)
