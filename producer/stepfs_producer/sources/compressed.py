"""Compressed files, decompressed from their beginning, and files that are of another kind than their names say."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import BinaryIO, Final

from stepfs.errors import CorruptError, MissingPackageError, UsageError
from stepfs_producer.sources.files import REMOTE, OpenFile, Stream, buffered

COMPRESSED: Final = (".gz", ".zst")
_PIECE_BYTES: Final = 256 << 10
_READ_BYTES: Final = 1 << 20  # of the file at a time: each is a request where the file is an object
_INPUT_BYTES: Final = 16 << 10  # one input piece may hold much more output
_MAGIC_BYTES: Final = 512
_TAR: Final = slice(257, 262)  # "ustar"; before it stands a name, which may begin as anything
_KINDS: Final = (
    (rb"\x1f\x8b\x08", "is gzip; let its name end in .gz"),
    (rb"\x28\xb5\x2f\xfd", "is zstd; let its name end in .zst"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "is bzip2; decompress it by `bunzip2`, or compress it anew by `gzip`"),
    (rb"\xfd7zXZ\0", "is xz; decompress it by `unxz`, or compress it anew by `gzip`"),
    (rb"PK\x03\x04", "is a zip archive; unpack it by `unzip`"),
    (rb"PAR1", "is Parquet; give its source format: parquet"),
    (rb"%PDF-", "is a PDF; take its text out by a program such as `pdftotext`, or leave it out"),
)


def is_compressed(name: str) -> bool:
    return name.endswith(COMPRESSED)


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """The same, and those of the compressed files."""
    return tuple(suffix + more for suffix in suffixes for more in ("", *COMPRESSED))


def check_kind(file: OpenFile) -> None:
    """`UsageError` for a local file that is of another kind than its name says, or if the library for it is missing;
    `CorruptError` if its beginning is damaged.
    """
    if is_compressed(file.location):
        if file.location.endswith(".zst") and find_spec("zstandard") is None:
            raise MissingPackageError(
                f"{file.location}: .zst files need the package zstandard: pip install 'stepfs[zstd]'"
            )
        next(decompressed(file), b"")
    elif not file.location.startswith(REMOTE):
        begin = file.read(0, min(file.size, _MAGIC_BYTES))
        for magic, what in _KINDS if begin[_TAR] != b"ustar" else ():
            if re.match(magic, begin):
                raise UsageError(f"{file.location} {what}")


@contextmanager
def opened(file: OpenFile) -> Iterator[tuple[BinaryIO, Stream]]:
    """The file as a buffered stream, decompressed where its name says so, and the raw stream below it."""
    if not is_compressed(file.location):
        with buffered(file) as found:
            yield found
        return
    raw = _Decompressed(file)
    with io.BufferedReader(raw, _PIECE_BYTES) as stream:
        yield stream, raw


class _Decompressed(Stream):
    """The same of decompressed bytes, which are read once, in order."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__(file)
        self._pieces = decompressed(file)
        self._held = memoryview(b"")

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            self._held = self._held or memoryview(next(self._pieces, b""))
        except Exception as error:
            self.failed = error
            raise
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count


def decompressed(file: OpenFile) -> Iterator[bytes]:
    """The decompressed bytes. `CorruptError` names a file that is damaged or ends too early."""
    return _zstd(file) if file.location.endswith(".zst") else _gzip(file)


def _gzip(file: OpenFile) -> Iterator[bytes]:
    """Decompress input in pieces of one size, so that the readable beginning of a damaged file is the same everywhere."""
    waiting, member = b"", None
    try:
        with buffered(file, _READ_BYTES) as (stream, _):
            while waiting := waiting or stream.read(_INPUT_BYTES):
                if member is None:
                    waiting = waiting.lstrip(b"\0")  # padding between members
                    member = zlib.decompressobj(wbits=31) if waiting else None
                    continue
                piece = member.decompress(waiting, _PIECE_BYTES)
                waiting = member.unconsumed_tail
                if member.eof:
                    waiting, member = member.unused_data, None
                if piece:
                    yield piece
    except zlib.error as error:
        raise CorruptError(f"{file.location}: damaged gzip ({error}); replace it or leave it out") from error
    if member is not None:
        if piece := member.flush():
            yield piece
        if not member.eof:
            raise CorruptError(f"{file.location}: damaged gzip (it ends within a member); replace it or leave it out")


def _zstd(file: OpenFile) -> Iterator[bytes]:
    import zstandard  # noqa: PLC0415  (optional)

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    waiting, frame = b"", None
    try:
        with buffered(file, _READ_BYTES) as (stream, _):
            while waiting := waiting or stream.read(_INPUT_BYTES):
                if frame is None:
                    frame = decompressor.decompressobj()
                piece = frame.decompress(waiting)
                waiting = frame.unused_data
                if frame.eof:
                    frame = None
                if piece:
                    yield piece
    except zstandard.ZstdError as error:
        raise CorruptError(f"{file.location}: damaged zstd ({error}); replace it or leave it out") from error
    if frame is not None:
        raise CorruptError(f"{file.location}: damaged zstd (it ends within a frame); replace it or leave it out")
