"""Which ranks read which slices of a step, under which file names, and how options select steps and ranks.

Micro-batches are divided among D data ranks in D equal runs, so the global batch is the same for every D. Tensor- and
pipeline-parallel peers read one slice; their files are hard links. `--world N` makes consecutive ranks peers, `--mesh`
gives the trainer's own device mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stepfs.errors import RefusedError, UsageError
from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.mesh import Mesh, parse_mesh
from stepfs.view.inodes import STEP_MAX
from stepfs.view.names import RANK_MAX, parse_rank, rank_name

if TYPE_CHECKING:  # the codec, for those who read a lake
    from stepfs.format.identity import LakeIdentity
    from stepfs.format.snapshot import LogState

Spelling = Callable[[str, object], str]  # a word of the caller and its value, as errors write them

_MICRO_DIGITS: Final = 4


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

    def peers_of(self, ranks: Sequence[int]) -> int:
        """The most of these ranks that read one slice; 1 without any."""
        return max(Counter(map(self._reader, ranks)).values(), default=1)

    def _reader(self, rank: int) -> int:
        assert 0 <= rank < self.world
        return rank // self.links if self.table is None else self.table[rank]


def as_option(word: str, value: object) -> str:
    return f"--{word} {value}"


def as_keyword(word: str, value: object) -> str:
    return f"{word}={value!r}"


def rank_map(
    grid: Grid, *, world: int | None = None, mesh: str | None = None, splits: bool = False, style: Spelling = as_option
) -> RankMap:
    """Map ranks to slices; `UsageError` for a world that the lake's grid cannot serve, naming both numbers.

    `splits`: the reader can take a part of a file that holds several micro-batches. `style`: how errors write a word of
    the caller, `--mesh dp=4` or `mesh='dp=4'`.
    """
    if mesh is not None:
        mapped = _from_mesh(grid, mesh, splits=splits and grid.micro == 1, style=style)
        if world not in {None, mapped.world}:
            raise UsageError(
                f"{style('world', world)} contradicts {style('mesh', mesh)}, which has {mapped.world} ranks: drop one"
            )
        return mapped
    readers = grid.ranks * grid.cp
    size = readers if world is None else world
    if not 0 < size <= RANK_MAX + 1 or size % readers:
        elastic = size > 0 and grid.cp == 1 and grid.units % size == 0
        way = f"{style('mesh', f'dp={size}')} for as many data ranks" if elastic else "produce a lake of other ranks"
        raise UsageError(
            f"{style('world', size)} does not fit this lake's {grid}: use a multiple of {readers}, or {way}"
        )
    return RankMap(grid, grid.ranks, size)


def _from_mesh(grid: Grid, text: str, *, splits: bool, style: Spelling) -> RankMap:
    try:
        mesh = parse_mesh(text)
    except ValueError as error:
        raise UsageError(f"{style('mesh', text)}: {error}") from error
    if grid.cp > 1 and mesh.context_ranks != grid.cp:
        raise UsageError(
            f"{style('mesh', text)}: cp has {mesh.context_ranks} ranks, and this lake's sequences are cut for cp={grid.cp}; they"
            " must be equal"
        )
    if not splits and grid.units % mesh.data_ranks:
        raise UsageError(f"{style('mesh', text)}: {_does_not_divide(grid, mesh)}")
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


def parse_steps(text: str) -> range:
    """`A:B` → steps A … B-1."""
    first, colon, end = text.partition(":")
    if not (colon and _is_number(first) and _is_number(end)) or not int(first) < int(end) <= STEP_MAX + 1:
        raise UsageError(f"--steps {text!r}: write A:B with A < B, for example 0:1000 (B is not included)")
    return range(Step(int(first)), Step(int(end)))


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0-3,8` → (0, 1, 2, 3, 8); both ends included."""
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)) or not int(first) <= int(last) <= RANK_MAX:
            raise UsageError(f"--ranks {text!r}: write ranks and ranges such as 0-7 or 0,2,4-5 (both ends included)")
        ranks.update(range(int(first), int(last) + 1))
    return tuple(sorted(ranks))


def hinted_slices(
    hinted: tuple[int, ...], ranks: RankMap, files: Sequence[int] | None = None
) -> tuple[SliceIndex, ...]:
    """The slices that these ranks (ascending) read: of these files, by default of all."""
    if hinted and hinted[-1] >= ranks.world:
        raise UsageError(
            f"there is no rank {hinted[-1]}: here are {ranks.world} ranks; name some of 0-{ranks.world - 1}"
        )
    return tuple(sorted({index for rank in hinted for index in ranks.slices_of(rank, files)}))


def check_steps(steps: range | None, state: LogState) -> None:
    """`RefusedError` for steps that will never come: a reader would find them absent after hours of training."""
    if steps is not None and state.sealed and steps.stop > state.next_step:
        advice = (
            f"Mount at most --steps {steps.start}:{state.next_step}"
            if steps.start < state.next_step
            else "Name steps that it has"
            if state.next_step
            else "Name another lake"
        )
        raise RefusedError(
            f"--steps {steps.start}:{steps.stop}: the lake is sealed and has {state.next_step} steps; no more will come. "
            f"{advice}"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15


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
