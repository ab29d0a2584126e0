"""Slices on a local disk: a second budget behind memory, which the next mount adopts after a crash.

One file per slice, named by everything that identifies its bytes, written to a temporary name and renamed. Nothing
is trusted: each load verifies a file like bytes from the store, and a file that fails is removed. A CRC is no
proof against an attacker, so the directory must be this user's own, 0700, and every file is opened
relative to it. It is the caller's alone (the mount holds a lock on it and removes it in the end). Written pages are flushed
and dropped from the page cache at once: they would be charged to this process's cgroup, and the budget knows nothing
of them.

Index and budget change on the event loop only; methods marked "Touches files" must run in a worker thread.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepfs.data.cache.reading_order import ReadingOrder
from stepfs.errors import RefusedError
from stepfs.format.descriptor import SliceRef
from stepfs.format.ids import SliceIndex, SliceKey, Step
from stepfs.own_directory import make_own
from stepfs.store.local.local_store import write_all

_NAME: Final = re.compile(r"^([0-9a-f]{32})-(\d{20})-(\d{7})-(\d{1,13})-([0-9a-f]{8})\.slice$")
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_FLUSHED_BYTES_MIN: Final = 1 << 20  # a flush per small file costs more than the pages it frees

_Keeps = Callable[[SliceKey], bool]


class DiskCache:
    """The files of one mount, under one limit."""

    def __init__(self, directory: Path, lake_id: str, *, limit: int) -> None:
        """Adopt `directory`/slices with the files of a crashed mount. `RefusedError`. Touches files."""
        self.limit = limit
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
                if ref.length >= _FLUSHED_BYTES_MIN:
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

    def read_into(self, key: SliceKey, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` of the slice's file; 0 if the file is gone. Unverified. Touches files."""
        found = self._files.get(key)
        if found is None:
            return 0
        try:
            descriptor = os.open(found[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        except OSError:
            return 0
        try:
            got = 0
            while got < len(buffer):
                count = os.preadv(descriptor, [buffer[got:]], offset + got)
                if not count:
                    break
                got += count
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
            status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            whole = stat.S_ISREG(status.st_mode) and match is not None and status.st_size == int(match[4])
            if match is not None and whole and match[1] == self._lake_id:
                self.add((Step(int(match[2])), SliceIndex(int(match[3]))), name, int(match[4]))
            else:
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
        passed = (key for key in self._files if order.passed(key[0]))
        for key in itertools.chain(consumed, passed):
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
