"""A store in a directory of a POSIX file system.

Calls run in worker threads and are not abandoned (but reads, where `abandons_reads`): a cancelled caller waits for its system
call, so a create always reports its outcome.
"""

import errno
import heapq
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar, TypeVarTuple

import trio

from stepfs.errors import AbsentError, CorruptError, RefusedError, StepfsError, StoreUnreachableError, UsageError
from stepfs.store.api import Buffer, Counts, Entry, Progress, Put, byte_views, check_key, check_prefix, ignore_progress

_RIGHT: Final = "; check owner, mode and mount options"
_LINKS: Final = "; file:// lakes need a file system with hard links, use another"
_FILES: Final = "; raise ulimit -n"
_REFUSALS: Final = {
    errno.EFBIG: "; raise ulimit -f",
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EROFS: _RIGHT,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ELOOP: "; remove the symbolic link that stands in its place",
    errno.ENOTDIR: "; move away the file that stands where a directory belongs",
    errno.EXDEV: _LINKS,
    errno.EOPNOTSUPP: _LINKS,
    errno.EMLINK: _LINKS,
    errno.ENOSYS: _LINKS,
}

STALE_TEMPORARY_S: Final = 24 * 3600
_VECTORS_MAX: Final = 1024  # IOV_MAX
_PIECE_BYTES: Final = 1 << 20  # read between two reports of progress
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
THREADS_MAX: Final = 16
_TEMPORARY: Final = ".stepfs-tmp"
_RACES_MAX: Final = 1000  # creates in a directory that reclaim keeps deleting; each round both sides progress
_AMBIGUOUS: Final = {errno.EIO, errno.ETIMEDOUT, errno.ESTALE}  # a server may have linked all the same
Listing = list[Entry]  # inside the class `list` is the verb
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in the way must not block


def explain(error: OSError, root: Path, doing: str) -> StepfsError:
    """The error to raise (from `error`) when `doing` ('write a/b', …) failed below `root`."""
    what = f"cannot {doing} on the file system of {root}: {(error.strerror or str(error)).lower()}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:  # producers and reclaimers wait for space, too
        return StoreUnreachableError(f"{what}; free space and retry")
    if error.errno in _REFUSALS:
        return RefusedError(what + _REFUSALS[error.errno])
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{what}; use a shorter directory")
    return StoreUnreachableError(f"{what} (errno {error.errno}); check the file system and retry")


@contextmanager
def explained(root: Path, doing: str) -> Iterator[None]:
    """Convert an `OSError` of the body with `explain`."""
    try:
        yield
    except OSError as error:
        raise explain(error, root, doing) from error


def links(path: Path) -> int:
    """The number of names of the file; opening it first makes a network file system ask its server (close-to-open)."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(handle).st_nlink
    finally:
        os.close(handle)


def fill(handle: int, offset: int, buffer: memoryview, landed: Progress = ignore_progress) -> int:
    """Read into `buffer` from byte `offset`; returns the number of bytes, fewer than the buffer's at the end of the
    file.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(handle, [buffer[done : done + _PIECE_BYTES]], offset + done)
        if got == 0:
            break
        done += got
        landed(done)
    return done


def write_all(handle: int, parts: Sequence[Buffer]) -> None:
    """Write the concatenation of `parts`, gathered by the kernel, not here."""
    views = byte_views(parts)
    while views:
        written = os.writev(handle, views[:_VECTORS_MAX])
        done = 0
        while done < len(views) and written >= views[done].nbytes:
            written -= views[done].nbytes
            done += 1
        del views[:done]
        if written:
            views[0] = views[0][written:]


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def collect_stale(place: Path, now_s: float) -> None:
    """Delete the leftovers of crashed writers; `now_s` is this file system's time, from a file just written."""
    with suppress(OSError), os.scandir(place) as scan:
        for entry in scan:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < now_s - STALE_TEMPORARY_S:
                    os.unlink(entry.path)  # noqa: PTH108 (already a str)


def file_system_time_s(place: Path) -> float:
    """The time of the file system that holds `place`: its server stamps inodes, and may disagree with our clock.

    Found by creating a file in `place` and removing it. If that is refused, or there is no space, our own clock is
    used: on a local file system it is the same clock.
    """
    name = place / f"{os.getpid()}-{secrets.token_hex(8)}"
    try:
        place.mkdir(exist_ok=True)
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        return time.time()
    try:
        return os.fstat(handle).st_ctime
    finally:
        os.close(handle)
        with suppress(OSError):
            name.unlink()


def list_keys(root: Path, prefix: str, after: str, limit: int | None, *, now_s: float | None = None) -> list[Entry]:
    """Regular files under `root` whose relative path starts with `prefix` and is > `after`.

    `now_s` is the file system's time, for ages: the seconds since the inode last changed. That is when the name was
    linked, or later. Not the mtime: it is old if a writer was stopped between writing and linking, and any process can
    set it. Hidden names, symbolic links and files that vanish meanwhile are left out. OSErrors other than absence
    pass.
    """
    base, _, rest = prefix.rpartition("/")
    start = f"{base}/" if base else ""
    return list(islice(_walk(root, start, rest, after, limit, now_s), limit))


def _walk(root: Path, base: str, starts: str, after: str, limit: int | None, now_s: float | None) -> Iterator[Entry]:
    for child in _in_order(_children(root / base, base, starts, after), limit):
        if child.endswith("/"):
            yield from _walk(root, child, "", after, limit, now_s)
            continue
        try:
            found = os.stat(root / child, follow_symlinks=False)  # noqa: PTH116 (a Path costs 2 x here)
        except FileNotFoundError:
            continue
        yield Entry(child, found.st_size, 0.0 if now_s is None else max(0.0, now_s - found.st_ctime))


def _in_order(children: list[str], limit: int | None) -> Iterator[str]:
    """A heap when the answer is short (it may need more than `limit`: files vanish, directories are empty)."""
    if limit is None:
        children.sort()
        yield from children
        return
    heapq.heapify(children)
    while children:
        yield heapq.heappop(children)


def _children(directory: Path, base: str, starts: str, after: str) -> list[str]:
    """Keys of files, and prefixes ('…/') of directories, that can contribute."""
    found: list[str] = []
    try:
        scan = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    with scan:
        for child in scan:
            name = child.name
            if name[0] == "." or not name.startswith(starts):
                continue
            key = base + name
            if child.is_file(follow_symlinks=False):
                if key > after:
                    found.append(key)
            elif child.is_dir(follow_symlinks=False):
                key += "/"
                if key > after or after.startswith(key):
                    found.append(key)
    return found


class LocalStore:
    """`stepfs.store.api.Store` over the directory `root`, which the first write creates."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = self.root.as_uri()
        self.abandons_reads = False  # and a buffer with them: for callers who never use one again
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
        place = check_key(key), offset, buffer, landed
        got = await self._run(self._read_into, *place, abandon=self.abandons_reads)
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
        return await self._run(self._list, check_prefix(prefix), after, limit, ages, abandon=self.abandons_reads)

    async def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        if names:
            self.counts.note("delete", *names)
            await self._run(self._delete, names)

    async def aclose(self) -> None:
        """Nothing to do: the store holds nothing between calls."""

    async def _run(self, work: Callable[[*Arguments], T], *arguments: *Arguments, abandon: bool = False) -> T:
        return await trio.to_thread.run_sync(work, *arguments, limiter=self._limiter, abandon_on_cancel=abandon)

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
            return fill(handle, offset, buffer, landed)

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
