"""The trainer's device mesh, as `--mesh` of a mount writes it, and the slices that a step needs for it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_DIMENSION: Final = re.compile(r"([a-z][a-z0-9_]{0,31})=([1-9][0-9]{0,6})", re.ASCII)
_DATA: Final = re.compile(r"(dp|fsdp|ddp|hsdp)(_[a-z0-9_]+)?")
_CONTEXT: Final = re.compile(r"cp(_[a-z0-9_]+)?")
SLICES_MAX: Final = 1 << 14  # of a step of any lake
_WORLD_MAX: Final = (1 << 20) - 1  # ranks that a mount has names for


@dataclass(frozen=True, slots=True)
class Mesh:
    """Dimensions, slowest first. Ranks that differ in others than the data dimensions read the same slice."""

    dimensions: tuple[tuple[str, int], ...]

    @property
    def slices(self) -> int:
        return math.prod(size for name, size in self.dimensions if _DATA.fullmatch(name))

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.dimensions)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dimensions)


def parse_mesh(value: object) -> Mesh:
    """`pp=2, dp=4, tp=2` → mesh. `ValueError` names the mistake."""
    if isinstance(value, Mesh):
        return value
    items = (
        [_DIMENSION.fullmatch(item.strip()) for item in value.split(",")] if isinstance(value, str) else []
    )
    if not items or None in items:
        raise ValueError(f"{value!r} is no mesh; write it as pp=2,dp=4,tp=2, slowest dimension first")
    mesh = Mesh(tuple((item[1], int(item[2])) for item in items if item))
    names = [name for name, _ in mesh.dimensions]
    if len(set(names)) != len(names):
        raise ValueError("a dimension is named twice; name each once")
    if any(size > 1 and _CONTEXT.fullmatch(name) for name, size in mesh.dimensions):
        raise ValueError(
            "cp > 1 is not supported yet; remove it, and let context-parallel ranks cut their rows"
        )
    if mesh.slices > SLICES_MAX:
        raise ValueError(f"its data dimensions make {mesh.slices} slices; a step has at most {SLICES_MAX}")
    if mesh.world > _WORLD_MAX:
        raise ValueError(f"it has {mesh.world} ranks; the most is {_WORLD_MAX}")
    return mesh
