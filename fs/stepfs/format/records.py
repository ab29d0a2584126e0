"""The identity of a lake, `lake.msgpack`, and the names that users give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError, UsageError
from stepfs.format.arguments import check_text
from stepfs.format.codec import Kind, decode, encode, readable
from stepfs.format.grid.record import Grid, decode_grid
from stepfs.format.ids import ID_BYTES_MAX, SLICES_MAX

_EXT: Final = re.compile(r"^(\.[A-Za-z0-9_-]{1,15}){1,3}$")
_LAKE_ID: Final = re.compile(r"^[0-9a-f]{32}$")


@dataclass(frozen=True, slots=True)
class LakeIdentity:
    """`lake.msgpack`: written once; everything else of the lake lives under its random id."""

    lake_id: str
    grid: Grid
    ext: str
    created_ms: int
    check_payload: bool = False  # slices are files of kind `ext`: producers and `verify --content` check it

    @property
    def slices(self) -> int:
        """Files of a step."""
        return self.grid.slices


def check_ext(ext: str) -> str:
    """A file extension such as `.pt` or `.tar.gz`; `UsageError` otherwise."""
    if not _EXT.fullmatch(ext):
        raise UsageError(f"extension {ext!r}: use a dot and letters or digits, such as .safetensors or .npy")
    return ext


def check_id(identifier: str, what: str) -> str:
    """A producer or group id: 1 to 256 bytes of printable UTF-8."""
    size = len(check_text(identifier, what, "run-0").encode(errors="surrogatepass"))
    if not 0 < size <= ID_BYTES_MAX or not identifier.isprintable():
        raise UsageError(f"{what} {identifier!r}: use 1 to {ID_BYTES_MAX} bytes of printable text")
    return identifier


def encode_lake(identity: LakeIdentity) -> bytes:
    body: dict[str, object] = {
        "lake": identity.lake_id,
        "slices": identity.slices,
        "grid": identity.grid.document(),
        "ext": identity.ext,
        "created": identity.created_ms,
    }
    if identity.check_payload:
        body["check_payload"] = True
    return readable(Kind.LAKE, encode(Kind.LAKE, body), identity, decode_lake)


def decode_lake(data: bytes, what: str) -> LakeIdentity:
    fields = decode(Kind.LAKE, data, what)
    lake_id = fields.text("lake")
    ext = fields.text("ext")
    if not _LAKE_ID.fullmatch(lake_id) or not _EXT.fullmatch(ext):
        raise CorruptError(f"{what}: lake id {lake_id!r} with extension {ext!r}")
    slices = fields.integer("slices", low=1, high=SLICES_MAX)
    grid = decode_grid(fields.map("grid"), slices, what)
    check_payload = "check_payload" in fields and fields.boolean("check_payload")
    return LakeIdentity(lake_id, grid, ext, fields.integer("created"), check_payload)
