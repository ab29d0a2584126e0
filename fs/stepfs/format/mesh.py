"""The trainer's device mesh: `pp=2,dp=4,tp=2`, slowest dimension first, as `--mesh` of a mount and `mesh` of a plan say it.

Data dimensions choose files. Context-parallel ranks take whole rows, so they are peers, unless the lake is cut along `cp`;
the ranks of every other dimension always are.
"""

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import RANKS_MAX, SLICES_MAX

_DIMENSION: Final = re.compile(r"([a-z][a-z0-9_]{0,31})=([1-9][0-9]{0,6})", re.ASCII)
_DATA: Final = re.compile(r"(dp|fsdp|ddp|hsdp)(_[a-z0-9_]+)?")
_CONTEXT: Final = re.compile(r"cp(_[a-z0-9_]+)?")
_TENSOR: Final = re.compile(r"tp(_[a-z0-9_]+)?")
_FOLDED: Final = re.compile(r".*_cp(_.*)?")  # torch's flattened dp_cp: its size is of two dimensions
_LIKE_DATA: Final = re.compile(r".*(dp|data).*|(batch|replica|shard).*")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Dimensions, slowest first. Ranks that differ in neither data nor context dimensions are peers."""

    dimensions: tuple[tuple[str, int], ...]

    @property
    def data_ranks(self) -> int:
        return math.prod(size for name, size in self.dimensions if _is_data(name))

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.dimensions)

    @property
    def context_ranks(self) -> int:
        return math.prod(size for name, size in self.dimensions if _CONTEXT.fullmatch(name))

    @property
    def document_multiple(self) -> int:
        """Tokens of which each document has a multiple where its parts go to all context ranks, head to tail, and these are
        cut for sequence parallelism once more.
        """
        tensor = math.prod(size for name, size in self.dimensions if _TENSOR.fullmatch(name))
        return tensor * (2 * self.context_ranks if self.context_ranks > 1 else 1)

    def readers(self) -> Iterator[tuple[int, int]]:
        """The data rank and the context rank of each rank of the world, in their order."""
        return map(self.reader_at, itertools.product(*(range(size) for _, size in self.dimensions)))

    def reader_at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        """The data rank and the context rank of the rank with these coordinates, one for each dimension."""
        data = context = 0
        for (name, size), coordinate in zip(self.dimensions, coordinates, strict=True):
            if _is_data(name):
                data = data * size + coordinate
            elif _CONTEXT.fullmatch(name):
                context = context * size + coordinate
        return data, context

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dimensions)


def parse_mesh(value: object) -> Mesh:
    """`pp=2, dp=4, tp=2` → mesh. `ValueError` names the mistake."""
    if isinstance(value, Mesh):
        return value
    items = [_DIMENSION.fullmatch(item.strip()) for item in value.split(",")] if isinstance(value, str) else []
    if not items or None in items:
        raise ValueError(f"{value!r} is no mesh; write it as pp=2,dp=4,tp=2, slowest dimension first")
    mesh = Mesh(tuple((item[1], int(item[2])) for item in items if item))
    names = [name for name, _ in mesh.dimensions]
    if len(set(names)) != len(names):
        raise ValueError("a dimension is named twice; name each once")
    for name in names:
        if not _is_data(name) and (_LIKE_DATA.fullmatch(name) or _is_misspelt(name)):
            raise ValueError(
                f"{name} looks like a data dimension and is none; call it dp, fsdp, ddp, hsdp or dp_…, and cp by itself"
            )
    if not any(map(_is_data, names)):
        raise ValueError("it has no data dimension; add one, such as dp=4 (dp=1 if every rank reads the same)")
    if mesh.data_ranks > SLICES_MAX:
        raise ValueError(f"its data dimensions make {mesh.data_ranks} slices; a step has at most {SLICES_MAX}")
    if mesh.world > RANKS_MAX:
        raise ValueError(f"it has {mesh.world} ranks; the most is {RANKS_MAX}")
    return mesh


def _is_misspelt(name: str) -> bool:
    """`fspd` would quietly make peers of data ranks."""
    return bool(difflib.get_close_matches(name, ("fsdp", "hsdp"), cutoff=0.75))


def _is_data(name: str) -> bool:
    return _DATA.fullmatch(name) is not None and _FOLDED.fullmatch(name) is None
