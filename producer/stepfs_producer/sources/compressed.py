"""`.gz` and `.zst` files as streams of bytes. A damaged one is named; it is no bad record, because all behind it is lost."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from stepfs.errors import CorruptError, MissingPackageError
from stepfs_producer.sources.files.opened import OpenFile, buffered

SUFFIXES: Final = (".gz", ".zst")
_PIECE_BYTES: Final = 256 << 10
_READ_BYTES: Final = 1 << 20  # of the file at a time: each is a request where the file is an object
_ZSTD_INPUT_BYTES: Final = 16 << 10  # one input piece may hold much more output


def is_compressed(name: str) -> bool:
    return name.endswith(SUFFIXES)


def check(file: OpenFile) -> None:
    """`UsageError` if the library for this file is missing; `CorruptError` if its beginning is damaged."""
    if file.location.endswith(".zst") and find_spec("zstandard") is None:
        raise MissingPackageError(f"{file.location}: .zst files need the package zstandard: pip install 'stepfs[zstd]'")
    next(pieces(file), b"")


def pieces(file: OpenFile) -> Iterator[bytes]:
    """The decompressed bytes. `CorruptError` names a file that is damaged or ends too early."""
    return _zstd(file) if file.location.endswith(".zst") else _gzip(file)


def _gzip(file: OpenFile) -> Iterator[bytes]:
    with buffered(file, _READ_BYTES) as (stream, raw):
        try:
            with gzip.GzipFile(fileobj=stream, mode="rb") as archive:
                while piece := archive.read(_PIECE_BYTES):
                    yield piece
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if raw.failed is not None:
                raise raw.failed from error
            raise CorruptError(f"{file.location}: damaged gzip ({error}); replace it or leave it out") from error


def _zstd(file: OpenFile) -> Iterator[bytes]:
    import zstandard  # noqa: PLC0415  (optional)

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    waiting, frame = b"", None
    try:
        with buffered(file, _READ_BYTES) as (stream, _):
            while waiting := waiting or stream.read(_ZSTD_INPUT_BYTES):
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
