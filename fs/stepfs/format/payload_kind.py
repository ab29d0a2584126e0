"""The signatures of files by extension: the first bytes that a slice must have.

Only the first bytes are compared: enough to tell a raw buffer from a file, cheap enough for every slice of a lake.
Extensions without a signature (`.bin`, `.json`, `.txt`) cannot be checked; for them `init --check-payload` is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

HEAD_BYTES: Final = 512  # the first bytes of a slice that the checks need

_SHOWN_BYTES: Final = 12
_SAFETENSORS_HEADER_MAX: Final = 100_000_000  # the limit of the safetensors library
_TAR_MAGIC_AT: Final = 257

_Test = Callable[[bytes, int], bool]  # (first bytes, length of the slice) → whether it can be such a file


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
