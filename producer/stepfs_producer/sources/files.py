"""Files of sources: opened, read in ranges, and what a format says of them."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from stepfs.errors import MissingPackageError, RefusedError, UsageError
from stepfs.store.listed import ADVICE
from stepfs_producer.sources.hub import SCHEME, HubDataset, parse_hub_url
from stepfs_producer.sources.record import FileRef, Fragment, Kind, Raw, SourceSpec, Unit, Value

if TYPE_CHECKING:
    from stepfs.store.listed import Bucket

HEAD_BYTES: Final = 64 << 10
_CHECKED_MAX: Final = 1 << 16
_checked: OrderedDict[tuple[str, str], None] = OrderedDict()

REMOTE: Final = ("s3://", "gs://", "az://", SCHEME)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as its directory or LIST shows it."""

    name: str
    location: str  # absolute path, or URL of an object
    size: int
    etag: str = ""  # of an object


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
    if location.startswith(REMOTE):
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
            raise RefusedError(f"{location} is gone; {ADVICE}") from error
        except PermissionError as error:
            raise RefusedError(f"{location} is not readable; change its mode") from error
        try:
            refused = self._change(os.fstat(self._descriptor), head)
        except BaseException:
            self.close()
            raise
        if refused:
            self.close()
            raise RefusedError(f"{location} {refused}; {ADVICE}")

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
                raise RefusedError(f"{self.location} became shorter while it was read; {ADVICE}")
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
        root, self._key = split_url(location)
        self._bucket = bucket_of(root, spec.source.endpoint_url, spec.source.profile)
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
    """`s3://bucket`, `gs://bucket` or `az://account/container`, and the key below it. The key is taken as it stands: '+', '%'
    and spaces mean themselves.
    """
    if url.startswith(SCHEME):
        found = parse_hub_url(url)
        return found.root, found.key
    scheme = url[:5]
    parts = url[5:].split("/", 2 if scheme == "az://" else 1)
    names, key = (parts[:2], parts[2:]) if scheme == "az://" else (parts[:1], parts[1:])
    if any("@" in name for name in names):
        raise UsageError("credentials do not belong into a URL; set AWS_ACCESS_KEY_ID, or name a `profile`")
    if not all(names) or len(names) < (2 if scheme == "az://" else 1):
        form = "az://account/container/prefix/" if scheme == "az://" else f"{scheme}bucket/prefix/"
        raise UsageError(f"{url!r} names no bucket; write {form}")
    return scheme + "/".join(names), "".join(key)


@lru_cache(maxsize=64)
def bucket_of(root: str, endpoint_url: str | None, profile: str | None) -> Bucket:
    """The bucket's reader; one per process, because its connections are worth keeping."""
    scheme, _, name = root.partition("://")
    if root.startswith(SCHEME):
        return HubDataset(root)
    if scheme == "s3":
        from stepfs.store.s3.read_only import ReadOnlyBucket  # noqa: PLC0415

        return ReadOnlyBucket(name, endpoint_url=endpoint_url, profile=profile)
    if find_spec("obstore") is None:
        extra = "gcs" if scheme == "gs" else "azure"
        raise MissingPackageError(f"{root} needs the package obstore: pip install 'stepfs[{extra}]'")
    from stepfs.store.cloud.place import azure_place, google_place  # noqa: PLC0415
    from stepfs.store.cloud.read_only import ReadOnlyPlace  # noqa: PLC0415

    if scheme == "gs":
        return ReadOnlyPlace(google_place(name, ""))
    account, _, container = name.partition("/")
    return ReadOnlyPlace(azure_place(account, container, ""))


class Format(ABC):
    """One format. Its objects hold nothing but parameters."""

    suffixes: tuple[str, ...] = ()  # ends of the names that it takes from directories; (): all

    @abstractmethod
    def kind(self, spec: SourceSpec) -> Kind: ...

    @abstractmethod
    def unit(self, name: str) -> Unit: ...

    @abstractmethod
    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        """The records of a fragment in stored order."""

    def decode(self, spec: SourceSpec, stored: Any) -> Value:  # noqa: ARG002
        """The value of `Raw.stored`; by default `records` has decoded it."""
        value: Value = stored
        return value

    def entries(self, files: Sequence[str]) -> Sequence[str]:
        """The entries to search, given the plan's `files`."""
        return files

    def choose(self, spec: SourceSpec, found: Sequence[FoundFile]) -> list[FoundFile]:  # noqa: ARG002
        """The files to list."""
        return list(found)

    def beside(self, name: str) -> str:  # noqa: ARG002
        """The file with the places of the records of `name`; "" if it has them itself."""
        return ""

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        """(records, bytes) of the file's parts; () if it has none. Refuses a file that it cannot read."""
        return ()

    def where(self, spec: SourceSpec, first: Fragment, offset: int) -> int | None:  # noqa: ARG002
        """The byte, or row, at which the record at `offset` of a file begins; None: it may be in any fragment. `first`:
        one of the file's.
        """
        return offset
