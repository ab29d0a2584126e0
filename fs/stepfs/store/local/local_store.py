"""A lake in a directory (file://): the guarantees of an object store from a local or shared POSIX file system.

Create-if-absent is `link(2)` of a fully written, fsynced temporary file: the name appears at once with all its
bytes, for exactly one of any number of racing processes or hosts. A network file system may send a link twice and
report EEXIST for our own success; the link count of the temporary file, and the bytes, reveal that. Rejected:
`O_CREAT|O_EXCL` (shows a partial object), `renameat2(RENAME_NOREPLACE)` (not on network file systems), `O_TMPFILE`
(same, and it leaves no name to count links of), lock files (outlive their holder). Where the fsync of a directory
failed, the create is UNKNOWN, and a read of the object fails until that fsync has succeeded.

Temporary files live in a hidden directory that listing never shows. The leftovers of crashes are deleted there by
their age on the file system's own clock. Calls run in worker threads and are never abandoned: a cancelled caller waits
for its system call, so a buffer is never written to after its owner went on, and a create always reports its outcome.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar, TypeVarTuple

import trio

from stepfs.errors import AbsentError, CorruptError, RefusedError
from stepfs.store.api import Buffer, Counts, Entry, Progress, Put, ignore_progress
from stepfs.store.local.files import collect_stale, file_system_time_s, fill, links, sync_directory, write_all
from stepfs.store.local.listing import list_keys
from stepfs.store.names import check_key, check_prefix
from stepfs.store.os_errors import explained

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
THREADS_MAX: Final = 16
_TEMPORARY: Final = ".stepfs-tmp"
_RACES_MAX: Final = 1000  # creates in a directory that reclaim keeps deleting; each round both sides progress
_AMBIGUOUS: Final = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE}  # a server may have linked all the same
Listing = list[Entry]  # inside the class `list` is the verb
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in the way must not block


class LocalStore:
    """`stepfs.store.api.Store` over the directory `root`, which the first write creates."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = self.root.as_uri()
        self.counts = Counts()
        self._limiter = trio.CapacityLimiter(THREADS_MAX)
        self._root_seen = False  # once seen, its absence is a lost mount, not an empty lake
        self._stale_collected = False
        self._unsynced: set[Path] = set()  # directories whose newest names may not be durable

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        self.counts.note("get", key)
        body = await self._run(self._get, check_key(key), bytes_max)
        self.counts.bytes_read += len(body or b"")
        return body

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        self.counts.note("get", key)
        got = await self._run(self._read_into, check_key(key), offset, buffer, landed)
        self.counts.bytes_read += got or 0
        return got

    async def create(self, key: str, body: bytes) -> Put:
        self.counts.note("create", key)
        outcome = await self._run(self._create, check_key(key), body)
        self.counts.bytes_written += len(body)
        return outcome

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
        del crc32c  # nothing lies between
        self.counts.note("put", key)
        await self._run(self._put, check_key(key), parts)
        self.counts.bytes_written += sum(memoryview(part).nbytes for part in parts)

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> list[Entry]:
        self.counts.note("list", prefix)
        return await self._run(self._list, check_prefix(prefix), after, limit, ages)

    async def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        if names:
            self.counts.note("delete", *names)
            await self._run(self._delete, names)

    async def aclose(self) -> None:
        """Nothing to do: the store holds nothing between calls."""

    async def _run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        return await trio.to_thread.run_sync(work, *arguments, limiter=self._limiter)

    def _get(self, key: str, bytes_max: int) -> bytes | None:
        with explained(self.root, f"read {key}"):
            self._sync_again(self.root / key)
            with self._opened(key) as handle:
                if handle is None:
                    return None
                size = os.fstat(handle).st_size
                if size > bytes_max:
                    raise CorruptError(f"{self.url}/{key} has {size} bytes, at most {bytes_max} make sense")
                body = bytearray(size)
                return bytes(memoryview(body)[: fill(handle, 0, memoryview(body))])

    def _read_into(self, key: str, offset: int, buffer: memoryview, landed: Progress) -> int | None:
        with explained(self.root, f"read {key}"), self._opened(key) as handle:
            if handle is None:
                return None
            got = fill(handle, offset, buffer)
            landed(got)
            return got

    @contextmanager
    def _opened(self, key: str) -> Iterator[int | None]:
        handle = self._open(key)
        try:
            yield handle
        finally:
            if handle is not None:
                os.close(handle)

    def _open(self, key: str) -> int | None:
        """A descriptor of the object, or None if absent.

        After a miss the freshly opened directory is searched again: that makes a network file system drop its cached
        absence of the name (close-to-open consistency).
        """
        path = self.root / key
        try:
            handle = os.open(path, _READ)
        except (FileNotFoundError, NotADirectoryError):
            try:
                directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return None
            try:
                handle = os.open(path.name, _READ, dir_fd=directory)
            except FileNotFoundError:
                return None
            finally:
                os.close(directory)
        self._root_seen = True
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)  # a directory: object stores have none
        return None

    def _create(self, key: str, body: bytes) -> Put:
        target = self.root / key
        with explained(self.root, f"create {key}"):
            if os.path.lexists(target):
                return Put.EXISTS
            with self._temporary([body]) as temporary:
                return self._link(temporary, target, body)

    def _link(self, temporary: Path, target: Path, body: bytes) -> Put:
        for _ in range(_RACES_MAX):
            try:
                os.link(temporary, target, follow_symlinks=False)
            except FileNotFoundError:
                self._make_directory(target.parent)
                continue
            except FileExistsError:
                if not (links(temporary) == 2 and self._same(target, body)):
                    return Put.EXISTS
            except OSError as error:
                if error.errno in _AMBIGUOUS:
                    self._unsynced.add(target.parent)
                    return Put.UNKNOWN
                raise
            try:
                self._sync(target)
            except OSError:
                return Put.UNKNOWN  # visible, maybe not durable
            return Put.CREATED
        raise RefusedError(f"cannot create {self._key(target)}: its directory or temporary file keeps vanishing")

    def _same(self, target: Path, body: bytes) -> bool:
        with self._opened(self._key(target)) as found:
            there = bytearray(len(body) + 1)
            return found is not None and there[: fill(found, 0, memoryview(there))] == body

    def _put(self, key: str, parts: Sequence[Buffer]) -> None:
        target = self.root / key
        with explained(self.root, f"write {key}"), self._temporary(parts) as temporary:
            for _ in range(_RACES_MAX):
                try:
                    temporary.replace(target)
                except FileNotFoundError:
                    self._make_directory(target.parent)
                    continue
                self._sync(target)
                return
        raise RefusedError(f"cannot write {key}: its directory or temporary file keeps vanishing")

    def _list(self, prefix: str, after: str, limit: int | None, ages: bool) -> Listing:
        with explained(self.root, f"list {prefix or 'the lake'}"):
            now_s = file_system_time_s(self.root / _TEMPORARY) if ages else None
            found = list_keys(self.root, prefix, after, limit, now_s=now_s)
            if not found:
                self._check_root()
            return found

    def _delete(self, keys: Sequence[str]) -> None:
        directories: set[PurePosixPath] = set()
        for key in keys:
            with explained(self.root, f"delete {key}"):
                try:
                    (self.root / key).unlink()
                except (FileNotFoundError, NotADirectoryError):
                    self._check_root()
                directories.update(PurePosixPath(key).parents[:-1])
        for directory in sorted(directories, reverse=True):  # children before their parents
            with suppress(OSError):  # not empty: in use. A create that loses its directory makes it again
                (self.root / directory).rmdir()

    @contextmanager
    def _temporary(self, parts: Sequence[Buffer]) -> Iterator[Path]:
        """A synced file of these bytes, until its name is taken away."""
        place = self.root / _TEMPORARY
        name = place / f"{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            handle = os.open(name, flags, 0o644)
        except FileNotFoundError:
            self._make_directory(place)
            handle = os.open(name, flags, 0o644)
        self._root_seen = True
        try:
            try:
                write_all(handle, parts)
                os.fsync(handle)
                now_s = os.fstat(handle).st_mtime
            finally:
                os.close(handle)
            if not self._stale_collected:
                self._stale_collected = True
                collect_stale(place, now_s)
            yield name
        finally:
            with suppress(OSError):
                name.unlink()

    def _make_directory(self, directory: Path) -> None:
        """`mkdir -p`, each new name made durable; refuses to create a lost root again."""
        missing = []
        while not directory.is_dir():
            if directory == self.root:
                self._check_root()
            missing.append(directory)
            directory = directory.parent
        for path in reversed(missing):
            with suppress(FileExistsError, FileNotFoundError):  # by another process: the caller loops
                path.mkdir()
                self._sync(path)

    def _sync(self, path: Path) -> None:
        """Make the name of `path` durable, and the names above it."""
        try:
            sync_directory(path.parent)
        except OSError:
            self._unsynced.add(path.parent)
            raise
        self._sync_again(path)

    def _sync_again(self, path: Path) -> None:
        for directory in self._unsynced.intersection(path.parents):
            with suppress(FileNotFoundError):  # deleted: no name is left in it
                sync_directory(directory)
            self._unsynced.discard(directory)

    def _check_root(self) -> None:
        if self._root_seen and not self.root.is_dir():
            raise AbsentError(f"{self.root} is gone; mount or restore it")
        self._root_seen = self._root_seen or self.root.is_dir()

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
