"""One file of a corpus, read in byte ranges, and refused by name if it is not the file that was listed.

A local file must have the listed size at every opening and begin as listed at the first one in this process; an object
is requested with its listed etag. Errors of the operating system and the store pass as they are: a caller that takes
one for a bad record loses data (P6). boto3 takes 0.3 s to import, so only sources on S3 pay for it.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from stepfs.errors import RefusedError, UsageError
from stepfs_producer.sources.block import FileRef
from stepfs_producer.sources.spec import SourceSpec

if TYPE_CHECKING:
    from stepfs.store.s3.read_only import ReadOnlyBucket

HEAD_BYTES: Final = 64 << 10
_CHECKED_MAX: Final = 1 << 16
_RESTORE: Final = "restore it, or give the source a new name to begin it anew"
_checked: OrderedDict[tuple[str, str], None] = OrderedDict()


class OpenFile(Protocol):
    """A file's bytes."""

    location: str
    size: int

    def read(self, begin: int, end: int) -> bytes:
        """Bytes `begin` … `end` - 1; both lie within the file. `OSError`, `RefusedError`, `StoreUnreachableError`."""
        ...

    def close(self) -> None: ...


def open_file(spec: SourceSpec, location: str, size: int, *, etag: str = "", head: str = "") -> OpenFile:
    """Open a listed file: `size`, `etag` and `head` as its listing has them. The caller closes it."""
    if location.startswith("s3://"):
        return _Object(spec, location, size, etag)
    return _Local(location, size, head)


def open_listed(spec: SourceSpec, ref: FileRef) -> AbstractContextManager[OpenFile]:
    """Open a listed file until the end of the block."""
    return closing(open_file(spec, ref.location, ref.size, etag=ref.etag, head=ref.head))


class _Local:
    def __init__(self, location: str, size: int, head: str) -> None:
        self.location = location
        self.size = size
        try:
            # A FIFO must not block.
            self._descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RefusedError(f"{location} is gone; {_RESTORE}") from error
        except PermissionError as error:
            raise RefusedError(f"{location} is not readable; change its mode") from error
        try:
            refused = self._change(os.fstat(self._descriptor), head)
        except BaseException:
            self.close()
            raise
        if refused:
            self.close()
            raise RefusedError(f"{location} {refused}; {_RESTORE}")

    def _change(self, status: os.stat_result, head: str) -> str:
        """How the file differs from the listed one; "" if it does not."""
        if not stat.S_ISREG(status.st_mode):
            return "is no file any more"
        if status.st_size != self.size:
            changed = "shorter" if status.st_size < self.size else "longer"
            return f"is {changed} than when it was listed ({status.st_size} bytes, not {self.size})"
        if head and (self.location, head) not in _checked:
            if head_of(self) != head:
                return "begins otherwise than when it was listed"
            _checked[self.location, head] = None
            if len(_checked) > _CHECKED_MAX:
                _checked.popitem(last=False)
        return ""

    def read(self, begin: int, end: int) -> bytes:
        pieces = []
        while begin < end:
            try:
                piece = os.pread(self._descriptor, end - begin, begin)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.location) from error
            if not piece:
                raise RefusedError(f"{self.location} became shorter while it was read; {_RESTORE}")
            pieces.append(piece)
            begin += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.close()


class _Object:
    def __init__(self, spec: SourceSpec, location: str, size: int, etag: str) -> None:
        self.location = location
        self.size = size
        bucket, self._key = split_url(location)
        self._bucket = bucket_of(bucket, spec.endpoint_url, spec.profile)
        self._etag = etag

    def read(self, begin: int, end: int) -> bytes:
        return self._bucket.read(self._key, begin, end, self._etag) if begin < end else b""

    def close(self) -> None:
        pass


def head_of(file: OpenFile) -> str:
    """Digest of the first 64 KiB: 32 hexadecimal digits."""
    return hashlib.blake2b(file.read(0, min(file.size, HEAD_BYTES)), digest_size=16).hexdigest()


class Stream(io.RawIOBase):
    """An open file as a binary stream, for libraries. `failed` is the error of reading: libraries rename exceptions."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._place = 0
        self.failed: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._place + len(buffer), self._file.size)
        if end <= self._place:
            return 0
        try:
            data = self._file.read(self._place, end)
        except Exception as error:
            self.failed = error
            raise
        buffer[: len(data)] = data
        self._place = end
        return len(data)


@contextmanager
def buffered(file: OpenFile, buffer_bytes: int = 256 << 10) -> Iterator[tuple[BinaryIO, Stream]]:
    """The file as a buffered stream, and the raw stream below it."""
    raw = Stream(file)
    with io.BufferedReader(raw, buffer_bytes) as stream:
        yield stream, raw


def split_url(url: str) -> tuple[str, str]:
    """Bucket and key of s3://bucket/key. The key is taken as it stands: '+', '%' and spaces mean themselves."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if "@" in bucket:
        raise UsageError("credentials do not belong into a URL; set AWS_ACCESS_KEY_ID, or name a `profile`")
    if not bucket:
        raise UsageError(f"{url!r} names no bucket; write s3://bucket/prefix/")
    return bucket, key


@lru_cache(maxsize=64)
def bucket_of(bucket: str, endpoint_url: str | None, profile: str | None) -> ReadOnlyBucket:
    """The bucket's reader; one per process, because its connections are worth keeping."""
    from stepfs.store.s3.read_only import ReadOnlyBucket  # noqa: PLC0415

    return ReadOnlyBucket(bucket, endpoint_url=endpoint_url, profile=profile)
