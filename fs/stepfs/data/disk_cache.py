"""Slices on a local disk: a second budget behind memory, which the next mount adopts after a crash, and its writer.

One file per slice, named by all that identifies its bytes. Each load verifies a file like bytes from the store. The directory
is this user's own (0700), and files are opened relative to it. Methods marked "Touches files" run in a worker thread; a
full or failing disk is no error of the mount.
"""

import itertools
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from stepfs._internal.own_directory import make_own
from stepfs.data.blocks import CachedSlice, Role
from stepfs.data.circuit_breaker import Attempt, Patience
from stepfs.data.counters import DataCounts
from stepfs.data.memory_cache import ReadingOrder
from stepfs.data.tuning import TUNING
from stepfs.errors import RefusedError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, SliceKey, Step
from stepfs.format.tgb import SliceRef
from stepfs.store.api import Progress
from stepfs.store.local.local_store import fill, write_all

_log = logging.getLogger("stepfs.data")

_NAME: Final = re.compile(r"^([0-9a-f]{32})-(\d{20})-(\d{7})-(\d{1,13})-([0-9a-f]{8})\.slice$")
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC

_READERS_MAX: Final = 64  # files read at a time

_Keeps = Callable[[SliceKey], bool]


class DiskCache:
    """The files of one mount, under one limit."""

    def __init__(self, directory: Path, lake_id: str, *, limit: int, shared: bool = False) -> None:
        """Adopt `directory`/slices with the files of a crashed mount. `shared`: with one that still writes there.
        `RefusedError`. Touches files.
        """
        self.limit = limit
        self._shared = shared
        self.used = 0
        self.order = ReadingOrder()
        self._lake_id = lake_id
        self._files: dict[SliceKey, tuple[str, int]] = {}  # name, bytes; in order of arrival
        self._consumed: dict[SliceKey, None] = {}
        self.path = directory / "slices"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory = make_own(self.path)
            self.adopted = self._adopt()  # how many files
        except OSError as error:
            raise RefusedError(
                f"{self.path}: cannot be used as cache ({error.strerror or error}); choose another --cache-dir"
            ) from error

    def holds(self, key: SliceKey, ref: SliceRef) -> bool:
        """Whether the cache has a file under the name of exactly this slice."""
        found = self._files.get(key)
        return found is not None and found[0] == self._name(key, ref.length, ref.crc32c)

    def consume(self, key: SliceKey) -> None:
        """The slice has no reader and expects none: its file leaves first."""
        if key in self._files:
            self._consumed[key] = None

    def make_room(self, key: SliceKey, size: int, is_pinned: _Keeps, is_last_copy: _Keeps) -> list[str] | None:
        """Names to remove so that a slice fits; None if it may not displace the others.

        Consumed files go first, then those the readers passed over, then the farthest ahead; never a pinned one, one that
        is nearer, or a last copy.
        """
        if size > self.limit:
            return None
        left = self.used
        victims: dict[SliceKey, None] = {}  # forgotten once they are enough, for they are removed only then
        while left + size > self.limit:
            victim = self._victim(key[0], lambda key: key in victims or is_pinned(key), is_last_copy)
            if victim is None:
                return None
            victims[victim] = None
            left -= self._files[victim][1]
        return [self.forget(victim) for victim in victims]

    def forget(self, key: SliceKey) -> str:
        """Take a file out of the index; returns its name, for `remove`."""
        name, size = self._files.pop(key)
        self._consumed.pop(key, None)
        self.used -= size
        return name

    def forget_below(self, step: Step, is_pinned: _Keeps) -> list[str]:
        """The same for all unpinned files of steps below."""
        return [self.forget(key) for key in list(self._files) if key[0] < step and not is_pinned(key)]

    def write(self, key: SliceKey, ref: SliceRef, parts: Sequence[memoryview]) -> str:
        """Write one slice; returns its name, for `add`. OSError if the disk is full or failing. Touches files."""
        name = self._name(key, ref.length, ref.crc32c)
        temporary, directory = f"{name}.tmp", self._directory
        try:
            descriptor = os.open(temporary, _WRITE, 0o600, dir_fd=directory)
            try:
                for part in parts:
                    write_all(descriptor, [part])
                if ref.length >= TUNING.flushed_bytes_min:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with suppress(FileNotFoundError):
                self._unlink(temporary)
            raise
        return name

    def add(self, key: SliceKey, name: str, size: int) -> None:
        self._files[key] = (name, size)
        self.used += size

    def read_into(self, key: SliceKey, offset: int, buffer: memoryview, landed: Progress) -> int:
        """Fill `buffer` from `offset` of the slice's file; 0 if the file is gone. Unverified. Touches files."""
        found = self._files.get(key)
        if found is None:
            return 0
        try:
            descriptor = os.open(found[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        except OSError:
            return 0
        try:
            got = fill(descriptor, offset, buffer, landed)
            os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)
        except OSError:
            return 0
        else:
            return got
        finally:
            os.close(descriptor)

    def remove(self, names: Sequence[str]) -> None:
        """Delete files; the first OSError, once all were tried. Touches files."""
        failed: OSError | None = None
        for name in names:
            try:
                self._unlink(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _adopt(self) -> int:
        for name in sorted(os.listdir(self._directory)):  # noqa: PTH208 (relative to a descriptor)
            match = _NAME.match(name)
            try:
                status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            except FileNotFoundError:  # removed by the one that still writes
                continue
            whole = stat.S_ISREG(status.st_mode) and match is not None and status.st_size == int(match[4])
            if match is not None and whole and match[1] == self._lake_id:
                self.add((Step(int(match[2])), SliceIndex(int(match[3]))), name, int(match[4]))
            elif not self._shared:
                self._unlink(name)
        for key in sorted(self._files, reverse=True):
            if self.used <= self.limit:
                break
            self.remove([self.forget(key)])
        return len(self._files)

    def close(self) -> None:
        """Let go of the directory; nothing may be called after that. The files stay."""
        os.close(self._directory)

    def _unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._directory)

    def _victim(self, step: Step, is_pinned: _Keeps, is_last_copy: _Keeps) -> SliceKey | None:
        order = self.order
        consumed = (key for key in self._consumed if not order.plans(key[0]))  # not to be read once more
        skipped = (key for key in self._files if order.skipped(key[0]))
        for key in itertools.chain(consumed, skipped):
            if not is_pinned(key):
                return key
        own, last = order.distance(step), order.farthest({key[0] for key in self._files})
        if last is None or order.distance(last) <= own:
            return None
        for key in self._farthest_first(last):
            if order.distance(key[0]) <= own:
                return None
            if not is_pinned(key) and not is_last_copy(key):
                return key
        return None

    def _farthest_first(self, last: Step) -> Iterator[SliceKey]:
        """The files of the step that is read last; then all. Usually one of the first will do, and 100,000 take time to sort."""
        yield from [key for key in self._files if key[0] == last]
        yield from sorted(self._files, key=lambda key: (self.order.distance(key[0]), key[1]), reverse=True)

    def _name(self, key: SliceKey, length: int, crc: int) -> str:
        return f"{self._lake_id}-{key[0]:020d}-{key[1]:07d}-{length}-{crc:08x}.slice"


@dataclass(eq=False)
class WriteBehind:
    """The disk side of a mount's slices; every method may be called without a disk, and then does nothing."""

    disk: DiskCache | None
    counts: DataCounts
    changed: Callable[[CachedSlice], None]  # called for every slice that became loadable from disk
    is_pinned: Callable[[SliceKey], bool]  # slices that are read: not displaced
    is_last_copy: Callable[[SliceKey], bool]  # slices only on disk: not displaced by others ahead
    patience: Patience

    def __post_init__(self) -> None:
        # Of its own, abandoned: a disk that hangs keeps neither other threads nor the end of a mount waiting.
        self._in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
        self._readers = trio.CapacityLimiter(_READERS_MAX)
        self._queue: deque[CachedSlice] = deque(maxlen=TUNING.disk_queue_max)
        self._leaving: list[str] = []
        self._wake = trio.Event()
        self._rest_until = float("-inf")
        self._floor = Step(0)
        self._warned = False
        if self.disk is not None:
            self.counts.adopted_files += self.disk.adopted

    def holds(self, held: CachedSlice) -> bool:
        """Whether the slice can be loaded from disk."""
        return self.disk is not None and self.disk.holds(held.key, held.ref)

    def unpinned(self, held: CachedSlice, *, consumed: bool) -> None:
        """A slice is pinned no more; `consumed` if no other reader is expected."""
        if self.disk is not None:
            if consumed:
                self.disk.consume(held.key)
            if held.key[0] < self._floor:
                self.forget_below(self._floor)

    def enqueue(self, held: CachedSlice) -> None:
        """A slice is complete in memory: keep a copy, unless it is being read already."""
        self._floor = min(self._floor, held.entry.step)
        if self.disk is not None and held.length and not held.role.pinned and not self.holds(held):
            self._queue.append(held)
            self._wake.set()

    def forget_below(self, step: Step) -> None:
        if self.disk is not None:
            self._floor = step
            self._queue_removal(self.disk.forget_below(step, self.is_pinned))

    async def load(self, held: CachedSlice, offset: int, attempt: Attempt) -> None:
        """Bytes from `offset` of the slice, unverified; `got` stays None where the disk is not asked, or does not answer."""
        disk = self.disk
        assert disk is not None

        async def read(buffer: memoryview, landed: Progress) -> int:
            return await trio.to_thread.run_sync(
                disk.read_into, held.key, offset, buffer, landed, abandon_on_cancel=True, limiter=self._readers
            )

        if not self.patience.is_over():
            await self.patience.wait_for(attempt, read)

    def reject(self, held: CachedSlice, problem: str) -> None:
        """A file did not verify: remove it."""
        assert self.disk is not None
        if self.disk.holds(held.key, held.ref):
            _log.warning("%s: step %d: %s; the cached copy is dropped", self.disk.path, held.entry.step, problem)
            self._queue_removal([self.disk.forget(held.key)])

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while self.disk is not None:
            self._wake = trio.Event()
            if self._leaving:
                names, self._leaving = self._leaving, []
                try:
                    await self._in_thread(self.disk.remove, names)
                except OSError as error:
                    self._rest(error)
            elif self._queue:
                await self._write(self.disk, self._queue.popleft())
            else:
                await self._wake.wait()

    async def _write(self, disk: DiskCache, held: CachedSlice) -> None:
        key, ref = held.key, held.ref
        if (
            trio.current_time() < self._rest_until
            or self.patience.is_over()
            or held.role is Role.CONSUMED
            or not held.ready
            or disk.holds(key, ref)
        ):
            return
        names = disk.make_room(key, ref.length, self.is_pinned, self.is_last_copy)
        if names is None:
            return
        self._queue_removal(names)
        parts = [held.window(number, 0, min(BLOCK_BYTES, piece.length)) for number, piece in enumerate(held.pieces)]
        try:
            name = await self._in_thread(disk.write, key, ref, parts)
        except OSError as error:
            self._rest(error)
            return
        finally:
            del parts  # they keep the buffers in sight
        self._enter(disk, key, name, ref)
        if disk.holds(key, ref):
            self.changed(held)

    def _rest(self, error: OSError) -> None:
        self._rest_until = trio.current_time() + TUNING.disk_rest_s
        if not self._warned and self.disk is not None:
            self._warned = True
            _log.warning("%s: %s; caching in memory only for now", self.disk.path, error.strerror)

    def _enter(self, disk: DiskCache, key: SliceKey, name: str, ref: SliceRef) -> None:
        forgotten = key[0] < self._floor and not self.is_pinned(key)
        if disk.used + ref.length > disk.limit or forgotten:
            self._queue_removal([name])
            return
        disk.add(key, name, ref.length)
        self.counts.disk_written += ref.length

    def _queue_removal(self, names: list[str]) -> None:
        self._leaving += names
        self._wake.set()
