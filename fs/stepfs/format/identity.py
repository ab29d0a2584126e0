"""What a lake is: its identity (`lake.msgpack`), how its files begin, and the names that users give."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError, UsageError
from stepfs.format.arguments import check_text
from stepfs.format.codec import Kind, decode, encode, readable, signed
from stepfs.format.commit import URL_BYTES_MAX
from stepfs.format.grid import Grid, decode_grid
from stepfs.format.ids import ID_BYTES_MAX, SLICES_MAX

HEAD_BYTES: Final = 512  # the first bytes of a slice that the checks need

HOME_GROUP: Final = ":home"  # of a replica: what the lake itself still has
REPLICA_GROUP: Final = ":replica/"  # of a lake: what a replica needs
FORK_GROUP: Final = ":fork/"  # of a lake: what a fork shares
PACE_GROUP: Final = ":pace/"  # where a run is: it holds no step, and producers keep near it

_SHOWN_BYTES: Final = 12
_SAFETENSORS_HEADER_MAX: Final = 100_000_000  # the limit of the safetensors library
_TAR_MAGIC_AT: Final = 257

_Test = Callable[[bytes, int], bool]  # (first bytes, length of the slice) → whether it can be such a file

_EXT: Final = re.compile(r"^(\.[A-Za-z0-9_-]{1,15}){1,3}$")
_LAKE_ID: Final = re.compile(r"^[0-9a-f]{32}$")


def _starts(*signatures: bytes) -> _Test:
    return lambda head, _length: head.startswith(signatures)


def _safetensors(head: bytes, length: int) -> bool:
    header = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and header <= min(_SAFETENSORS_HEADER_MAX, length - 8)


def _tar(head: bytes, _length: int) -> bool:
    empty = len(head) == HEAD_BYTES and not any(head)  # an archive without members begins with its end
    return empty or head[_TAR_MAGIC_AT:].startswith(b"ustar")


_ZIP: Final = _starts(b"PK\x03\x04", b"PK\x05\x06")  # the second: an archive without members
_TESTS: Final[dict[str, tuple[str, _Test]]] = {
    ".npy": ("what numpy.save writes", _starts(b"\x93NUMPY")),
    ".npz": ("a zip archive", _ZIP),
    ".pt": ("a zip archive, as torch.save writes", _ZIP),
    ".pth": ("a zip archive, as torch.save writes", _ZIP),
    ".zip": ("a zip archive", _ZIP),
    ".safetensors": ("a safetensors header", _safetensors),
    ".tar": ("a tar header", _tar),
    ".gz": ("gzip", _starts(b"\x1f\x8b")),
    ".tgz": ("gzip", _starts(b"\x1f\x8b")),
    ".zst": ("zstandard", _starts(b"\x28\xb5\x2f\xfd")),
    ".parquet": ("Parquet", _starts(b"PAR1")),
    ".arrow": ("an Arrow file", _starts(b"ARROW1")),
    ".png": ("PNG", _starts(b"\x89PNG\r\n\x1a\n")),
    ".jpg": ("JPEG", _starts(b"\xff\xd8\xff")),
    ".jpeg": ("JPEG", _starts(b"\xff\xd8\xff")),
}
CHECKED_EXTENSIONS: Final = tuple(_TESTS)


def is_checkable(ext: str) -> bool:
    """Whether files of this extension (its last component) have a known signature."""
    return _last(ext) in _TESTS


def payload_problem(ext: str, head: bytes, length: int) -> str | None:
    """The reason why a slice of `length` bytes cannot be a file of `ext`; None if it can, or for an unknown extension.

    `head`: the slice's first `HEAD_BYTES` bytes, or all of them if there are fewer.
    """
    if not is_checkable(ext):
        return None
    expected, test = _TESTS[_last(ext)]
    if test(head, length):
        return None
    found = f"begins with {head[:_SHOWN_BYTES]!r}" if length else "is empty"
    return f"is no {ext} file ({expected}): it {found}"


def _last(ext: str) -> str:
    return "." + ext.rpartition(".")[2].lower()


@dataclass(frozen=True, slots=True)
class LakeIdentity:
    """`lake.msgpack`: written once; everything else of the lake lives under its random id."""

    lake_id: str
    grid: Grid
    ext: str
    created_ms: int
    check_payload: bool = False  # slices are files of kind `ext`: producers and `verify --check-payload` check it
    replica_of: str | None = None  # URL of the lake whose commits are copied here; nobody else adds any
    archive: bool = False  # a replica that gives up no step

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


def check_group(name: str) -> str:
    """The name of a training run, as `check_id` takes it, without `:`: stepfs itself keeps steps under such names."""
    if ":" in check_id(name, "group"):
        raise UsageError(
            f"group {name!r}: names with ':' are those under which stepfs keeps steps for replicas and forks; take "
            f"{name.strip(':').replace(':', '-') or 'run-0'!r}"
        )
    return name


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
    if identity.replica_of is not None:
        body["replica_of"] = identity.replica_of
    if identity.archive:
        body["archive"] = True
    return readable(Kind.LAKE, encode(Kind.LAKE, signed(body)), identity, decode_lake)


def decode_lake(data: bytes, what: str) -> LakeIdentity:
    fields = decode(Kind.LAKE, data, what)
    lake_id = fields.text("lake")
    ext = fields.text("ext")
    if not _LAKE_ID.fullmatch(lake_id) or not _EXT.fullmatch(ext):
        raise CorruptError(f"{what}: lake id {lake_id!r} with extension {ext!r}")
    slices = fields.integer("slices", low=1, high=SLICES_MAX)
    grid = decode_grid(fields.map("grid"), slices, what)
    check_payload = "check_payload" in fields and fields.boolean("check_payload")
    replica_of = fields.text("replica_of", bytes_max=URL_BYTES_MAX) if "replica_of" in fields else None
    archive = "archive" in fields and fields.boolean("archive")
    return LakeIdentity(lake_id, grid, ext, fields.integer("created"), check_payload, replica_of, archive)
