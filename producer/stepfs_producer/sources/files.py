"""Files of sources: found by name, opened, and what a format says of them."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import stat
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol
from urllib.parse import unquote, urlsplit

from stepfs.errors import AbsentError, MissingPackageError, RefusedError, UsageError
from stepfs.store.listed import ADVICE
from stepfs_producer.sources.record import FileRef, Fragment, Kind, Raw, SourceSpec, Unit, Value

if TYPE_CHECKING:
    from stepfs.store.listed import Bucket

HEAD_BYTES: Final = 64 << 10
_CHECKED_MAX: Final = 1 << 16
_checked: OrderedDict[tuple[str, str], None] = OrderedDict()

REMOTE: Final = ("s3://", "gs://", "az://")
_MAGIC: Final = frozenset("*?[")
Found = tuple[str, str, int, str]  # path below the prefix, location, bytes, etag


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
        self._bucket = bucket_of(root, spec.endpoint_url, spec.profile)
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


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as its directory or LIST shows it."""

    name: str
    location: str  # absolute path, or URL of an object
    size: int
    etag: str = ""  # of an object


def find_files(
    entries: Sequence[str],
    suffixes: Sequence[str],
    *,
    endpoint_url: str | None = None,
    profile: str | None = None,
) -> list[FoundFile]:
    """Files of all entries, sorted by name as UTF-8. Below directories only those that end in one of `suffixes`.

    `AbsentError` for an entry that does not exist, `RefusedError` for one that may not be read, `UsageError` for one
    that is neither file nor directory.
    """
    taken: dict[str, FoundFile] = {}
    for number, entry in enumerate(entries):
        found = (
            _objects(entry, suffixes, endpoint_url, profile) if entry.startswith(REMOTE) else _local(entry, suffixes)
        )
        matched = False
        for below, location, size, etag in found:
            matched = True
            taken.setdefault(location, FoundFile(f"{number}/{below}", location, size, etag))
        if not matched:
            wanted = f" that end in {', '.join(suffixes)}" if suffixes and not _is_glob(entry) else ""
            raise AbsentError(f"{entry}: no files{wanted}; name files, a directory of them, or a glob that matches")
    files = sorted(taken.values(), key=lambda file: file.name.encode())
    for before, after in pairwise(files):
        if before.name == after.name:
            raise UsageError(f"{before.location} and {after.location} have the same printable name; rename one")
    return files


def _is_glob(entry: str) -> bool:
    return not _MAGIC.isdisjoint(entry)


def _before_wildcards(pattern: str) -> str:
    return pattern[: min(place for mark in _MAGIC if (place := pattern.find(mark)) >= 0)]


def _literal_prefix(pattern: str) -> str:
    """The components before the first one with a wildcard, with their '/'."""
    before = _before_wildcards(pattern)
    return before[: before.rfind("/") + 1]


def _local(entry: str, suffixes: Sequence[str]) -> Iterator[Found]:
    path = os.path.abspath(os.path.expanduser(_path_of(entry)))  # noqa: PTH100, PTH111  (resolve() follows links)
    if "\0" in path:
        raise UsageError(f"{entry!r}: not a path; name files, directories or globs")
    if _is_glob(path) and not os.path.lexists(path):
        prefix = _literal_prefix(path)
        for match in glob.iglob(path, recursive=True):  # noqa: PTH207
            yield from _at(match, suffixes, prefix)
        return
    is_directory = stat.S_ISDIR(_status(path).st_mode)
    yield from _at(path, suffixes, path if is_directory else os.path.dirname(path))  # noqa: PTH120


def _path_of(entry: str) -> str:
    scheme, _, rest = entry.partition("://")
    if scheme in {"http", "https", "hf"}:
        way = f"hf download {rest}" if scheme == "hf" else f"curl -O {entry}"
        raise UsageError(f"{entry}: sources are files, or lie at s3://, gs:// or az://; fetch it first: {way}")
    if scheme != "file" or not rest:
        return entry
    parts = urlsplit(entry)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise UsageError(f"{entry!r} is not absolute; write file:///directory")
    return unquote(parts.path)


def _at(path: str, suffixes: Sequence[str], prefix: str) -> Iterator[Found]:
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        yield from _walk(path, suffixes, prefix)
    elif stat.S_ISREG(status.st_mode):
        yield _below(path, prefix), path, status.st_size, ""
    else:
        raise UsageError(f"{path}: neither a file nor a directory; name regular files or directories of them")


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentError(f"{path}: no such file or directory; name files that exist") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; make the file readable") from error


def _walk(root: str, suffixes: Sequence[str], prefix: str) -> Iterator[Found]:
    pending = [root]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            raise RefusedError(f"{directory}: {error.strerror}; make the directory readable") from error
        for entry in visible:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif _wanted(entry.name, suffixes):
                try:
                    status = entry.stat()
                except OSError:
                    if not entry.is_symlink():
                        raise
                    continue  # a dangling link is no file, and no reason to stop
                if stat.S_ISREG(status.st_mode):
                    yield _below(entry.path, prefix), entry.path, status.st_size, ""


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    return not suffixes or name.endswith(tuple(suffixes))


def _below(path: str, prefix: str) -> str:
    # A file name is any bytes; listings and positions carry it as UTF-8 text.
    return os.fsencode(os.path.relpath(path, prefix)).decode("utf-8", "backslashreplace")


def _objects(entry: str, suffixes: Sequence[str], endpoint_url: str | None, profile: str | None) -> Iterator[Found]:
    root, key = split_url(entry)
    bucket = bucket_of(root, endpoint_url, profile)
    if _is_glob(key):
        prefix = _literal_prefix(key)
        pattern = key[len(prefix) :].split("/")
        for found in bucket.list(_before_wildcards(key)):
            below = found.key[len(prefix) :]
            if not below.endswith("/") and _matches(below.split("/"), pattern):
                yield below, f"{root}/{found.key}", found.size, found.etag
        return
    prefix = key if not key or key.endswith("/") else f"{key}/"
    if key != prefix:
        first = next(bucket.list(key), None)  # the key itself is the first; what only begins so may be millions
        if first is not None and first.key == key:
            yield key.rpartition("/")[2], f"{root}/{key}", first.size, first.etag
            return
    for found in bucket.list(prefix):
        below = found.key.removeprefix(prefix)
        hidden = any(part.startswith(".") for part in below.split("/"))
        if not hidden and below[-1:] not in {"", "/"} and _wanted(below, suffixes):
            yield below, f"{root}/{found.key}", found.size, found.etag


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match paths as `glob` does: `**` is any directories, other wildcards stay within a name and skip hidden ones."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(
            _matches(parts[skipped:], pattern[1:] or ["*"])
            for skipped in range(len(parts))
            if not any(part.startswith(".") for part in parts[:skipped])
        )
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


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

    def choose(self, found: Sequence[FoundFile]) -> list[FoundFile]:
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
