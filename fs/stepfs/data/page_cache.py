"""The kernel's page cache: verified slices are pushed into it before they are opened, so that reads need no request.

Pages count against the daemon's own memory. Calls that touch the mount wait for this very daemon: they run in
`MountThreads`, never on the event loop or in a pool that others need.
"""

import ctypes
import itertools
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import trio

from stepfs._internal import tracing
from stepfs.data.blocks import CachedSlice
from stepfs.data.slices import PageCache, Priming, Slices
from stepfs.data.tuning import TUNING
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, SliceKey, Step

_SYS_CACHESTAT: Final = 451  # the same on every architecture
_PAGE: Final = mmap.PAGESIZE
_PROT_READ: Final = 1
_MAP_SHARED: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

FILES_MAX: Final = 64
_BYTES_MIN: Final = 1 << 20  # of small files, so much goes by one call into a thread
_log = logging.getLogger("stepfs.data")
_THREADS: Final = 2
_FAILURES_MAX: Final = 3  # in a row: this kernel, or this kind of mount, cannot be primed
T = TypeVar("T")
CHUNK_BYTES: Final = 1 << 20  # page-aligned; the last one of a file ends exactly at its end


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def resident_bytes(path: Path, length: int) -> int | None:
    """Bytes of the file that a reader would find cached, whole pages counted up to `length`."""
    with _opened(path) as descriptor:
        return resident_bytes_of(descriptor, length)


def resident_bytes_of(descriptor: int, length: int) -> int | None:
    """`resident_bytes` of an open file."""
    pages = _cachestat_pages(descriptor, length)
    if pages is None:
        pages = _mincore_pages(descriptor, length)
    return None if pages is None else min(pages * _PAGE, length)


def drop_pages(path: Path) -> None:
    """Let the kernel forget the file's clean pages."""
    with _opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def mark_used(path: Path, length: int) -> None:
    """Let the kernel count the file's pages as used, without copying a byte of them.

    Otherwise the first reader pays for that (a sixth of its time, for pages moved to the active list one by one), and
    until then they are the first to be evicted. OSError if one of them is not there.
    """
    with _opened(path) as descriptor, _opened(Path(os.devnull), os.O_WRONLY) as nowhere:
        offset = 0
        while offset < length and (count := os.sendfile(nowhere, descriptor, offset, length - offset)):
            offset += count


def _cachestat_pages(descriptor: int, length: int) -> int | None:
    where = (ctypes.c_uint64 * 2)(0, length)  # offset, length
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, writeback, evicted, recently evicted
    failed = _libc.syscall(_SYS_CACHESTAT, descriptor, ctypes.byref(where), ctypes.byref(found), 0)
    return None if failed else int(found[0])


def _mincore_pages(descriptor: int, length: int) -> int | None:
    if not length:
        return 0
    address = _libc.mmap(None, length, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address in {None, ctypes.c_void_p(-1).value}:
        return None
    try:
        pages = ctypes.create_string_buffer(-(-length // _PAGE))
        if _libc.mincore(address, length, pages):
            return None
        return sum(byte & 1 for byte in pages.raw)
    finally:
        _libc.munmap(address, length)


class PageOrder:
    """The primed files that may lose their pages."""

    def __init__(self, mark: Callable[[SliceKey, bool], None] = lambda *_: None) -> None:
        """`mark` is told of each file whether its pages may go, when that changes."""
        self._mark = mark
        self._consumed: dict[SliceKey, None] = {}  # opened and closed
        # Opened and closed, and another reader is expected: bytes; not dropped.
        self.awaited: dict[SliceKey, int] = {}
        self.awaited_bytes = 0
        self._idle: dict[SliceKey, None] = {}  # open, apparently without a reader

    def __bool__(self) -> bool:
        return bool(self._consumed or self._idle)

    def __iter__(self) -> Iterator[SliceKey]:
        return itertools.chain(self._consumed, self._idle)

    def closed(self) -> list[SliceKey]:
        return [*self.awaited, *self._consumed]

    def consume(self, key: SliceKey) -> None:
        before = self.discard(key)
        self._consumed[key] = None
        if not before:
            self._mark(key, True)

    def restore(self, key: SliceKey) -> None:
        """A daemon before this one has marked it: its pages may go."""
        self._consumed[key] = None

    def keep_for_peer(self, key: SliceKey, length: int) -> None:
        """The file was closed, and another reader is expected."""
        if self.discard(key):
            self._mark(key, False)
        self.awaited[key] = length
        self.awaited_bytes += length

    def make_idle(self, key: SliceKey) -> None:
        if key not in self._consumed and key not in self._idle:
            self._idle[key] = None
            self._mark(key, True)

    def discard(self, key: SliceKey) -> bool:
        """Forget it; whether it could lose its pages."""
        could = key in self._consumed or key in self._idle
        self._consumed.pop(key, None)
        self._idle.pop(key, None)
        self.awaited_bytes -= self.awaited.pop(key, 0)
        return could


def first_of(keys: Iterable[SliceKey], size: int, length: Callable[[SliceKey], int]) -> list[SliceKey]:
    """The first files of at least `size` bytes together, if there are so many; of small files several."""
    found: list[SliceKey] = []
    found_bytes = 0
    for key in itertools.islice(keys, FILES_MAX):
        found.append(key)
        found_bytes += length(key)
        if found_bytes >= max(size, _BYTES_MIN):
            break
    return found


class MountThreads:
    """A small pool of them."""

    def __init__(self) -> None:
        self.working = True
        self._failures = 0
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._numbers: set[int] = set()

    def has(self, number: int) -> bool:
        """Whether a thread, by the kernel's number, is one of these and at work."""
        return number in self._numbers

    async def call(self, work: Callable[[], T]) -> T | None:
        """Run in one of them; None if the step is gone or the kernel refuses, which ends `working` in time."""

        def own() -> T:
            number = threading.get_native_id()
            self._numbers.add(number)
            try:
                return work()
            finally:
                self._numbers.discard(number)

        try:
            done = await trio.to_thread.run_sync(own, limiter=self._limiter)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failures += 1
            if self._failures >= _FAILURES_MAX:
                self.working = False
                _log.info("the page cache of this mount cannot be primed (%s); reading goes on without", error)
            return None
        self._failures = 0
        return done


class Table(Protocol):
    """Where what is primed is on record, a place for each file, for the next daemon of the mount."""

    def read(self) -> Iterator[tuple[int, SliceKey, int, bool]]: ...
    def enter(self, key: SliceKey, length: int) -> int: ...
    def write(self, files: Iterable[tuple[int, SliceKey, int, bool]]) -> None: ...
    def mark(self, place: int, *, unneeded: bool) -> None: ...
    def leave(self, place: int) -> None: ...


@dataclass(slots=True)
class _Primed:
    length: int
    place: int = -1  # in the table
    checked: bool = False  # was found whole when its turn came


class Primer(Priming):
    """The primed slices of one mount."""

    def __init__(self, slices: Slices, pages: PageCache, table: Table | None = None) -> None:
        self._table = table
        self.bytes = 0  # in the page cache, as far as is known
        self._slices = slices
        self._pages = pages
        self._primed: dict[SliceKey, _Primed] = {}
        self._order = PageOrder(self._mark)  # the order in which pages are dropped
        self._evicted: set[SliceKey] = set()  # were primed before
        self._refused: set[SliceKey] = set()  # could not be primed: not shown here, or the kernel would not
        self._todo: deque[CachedSlice] = deque()  # ready and requested, nearest first, as of the last look
        self._stale = True  # the requests or the ready slices may have changed
        self._sample: tuple[Step | None, frozenset[SliceIndex]] = (None, frozenset())
        self._suspect: Step | None = None  # a step of which something was evicted
        self.threads = MountThreads()
        self.turn = trio.Lock()  # whoever holds it keeps the primer away from the mount
        self._wake = trio.Event()
        self._rests = trio.Event()
        slices.attach(self)

    def stop(self) -> None:
        self.threads.working = False
        self._wake.set()

    @property
    def primed(self) -> Collection[SliceKey]:
        return self._primed.keys()

    def inherit(self) -> None:
        """Take over what another daemon has primed, as far as there is room for it."""
        assert self._table is not None
        for place, key, length, unneeded in self._table.read():
            if key in self._primed or not self._slices.cache.charge(length):
                self._table.leave(place)
                continue
            self._primed[key] = _Primed(length, place)
            self.bytes += length
            if unneeded:
                self._order.restore(key)

    def put_again(self) -> None:
        """Write what is primed where another daemon has written meanwhile."""
        if self._table is not None:
            unneeded = set(self._order)
            files = [(primed.place, key, primed.length, key in unneeded) for key, primed in self._primed.items()]
            self._table.write(files)

    def _mark(self, key: SliceKey, unneeded: bool) -> None:
        primed = self._primed.get(key)
        if primed is not None and primed.place >= 0 and self._table is not None:
            self._table.mark(primed.place, unneeded=unneeded)

    def changed(self) -> None:
        self._stale = True
        self._wake.set()

    async def settle(self) -> None:
        rests = self._rests
        self.changed()
        if self.threads.working:
            await rests.wait()

    def idle(self, key: SliceKey) -> None:
        if key in self._primed:
            self._order.make_idle(key)

    def closed(self, key: SliceKey, *, awaited: bool = False) -> None:
        # Thousands of small files are closed per second: the cost must not grow with the number of prefetch requests.
        primed = self._primed.get(key)
        if primed is not None:
            primed.checked = False  # if it is read again, the kernel may have dropped it meanwhile
            if (
                not awaited
                or self._order.awaited_bytes + primed.length
                > TUNING.primed_awaited_share * self._slices.cache.pool.limit
            ):
                self._order.consume(key)
            else:
                self._order.keep_for_peer(key, primed.length)
        if self._todo:
            self._wake.set()

    def forget_below(self, step: Step) -> None:
        for key in [key for key in self._primed if key[0] < step]:
            self._forget(key)
        self._evicted = {key for key in self._evicted if key[0] >= step}
        self._refused = {key for key in self._refused if key[0] >= step}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Prime, check and drop in the background until cancelled, or until it turns out to be impossible."""
        task_status.started()
        while self.threads.working:
            self._wake = trio.Event()
            async with self.turn:
                found = await self._drop_surplus() or await self._check_next() or await self._prime_next()
            if not found:
                self._rests.set()
                self._rests = trio.Event()
                await self._wake.wait()
        self._rests.set()
        for key in list(self._primed):
            self._forget(key)

    async def _drop_surplus(self) -> bool:
        pool = self._slices.cache.pool
        surplus = pool.used - pool.limit
        if surplus <= 0 or not self._primed:
            return False
        await self._drop(self._first(self._order, surplus) or self._first(self._farthest_first(), surplus))
        return True

    async def _check_next(self) -> bool:
        """One primed slice of the step that is opened next, if it was not looked at yet.

        Looking costs an open; of many small files a few are asked, and all of them once one is not whole.
        """
        for entry, indices in self._slices.requested[:1]:
            for index in self._to_look_at(entry.step, indices):
                primed = self._primed.get((entry.step, index))
                if primed is not None and not primed.checked:
                    await self._check((entry.step, index), primed)
                    return True
        return False

    def _to_look_at(self, step: Step, indices: Sequence[SliceIndex]) -> Sequence[SliceIndex]:
        """Sample a fixed subset per step; resampling the shrinking remainder would eventually check every file."""
        if step == self._suspect:
            return indices
        if self._sample[0] != step:
            self._sample = step, frozenset(indices[:: max(1, len(indices) // TUNING.checked_sample)])
        return [index for index in indices if index in self._sample[1]]

    async def _check(self, key: SliceKey, primed: _Primed) -> None:
        primed.checked = True
        path = self._pages.path(*key)
        resident = await self.threads.call(lambda: resident_bytes(path, primed.length))
        if resident is not None and resident < primed.length and self._primed.get(key) is primed:
            self._suspect = key[0]
            self._evicted.add(key)
            self._forget(key)
            self._slices.replan()

    async def _prime_next(self) -> bool:
        """The nearest slices that are ready and not in the page cache yet; False if there is none, or no room."""
        if self._stale:
            self._stale = False
            self._todo = deque(self._candidates())
        batch: list[CachedSlice] = []
        size = 0
        while self._todo and len(batch) < TUNING.primed_batch_files and size < BLOCK_BYTES:
            held = self._todo[0]
            wanted = held.ready and held.key not in self._primed  # still
            if wanted and await self._room(held):
                self._enter(held)
                batch.append(held)
                size += held.length
            elif wanted and held.ready:
                break  # no room: it is the first when something is closed
            self._todo.popleft()
        if batch:
            await self._prime(batch)
        return bool(batch)

    def _candidates(self) -> Iterator[CachedSlice]:
        for entry, indices in self._slices.requested:
            for index in indices:
                key = entry.step, index
                if key in self._primed or key in self._refused:
                    continue
                held = self._slices.cache.get(*key)
                # Priming an open file would hide its reads from us.
                if held is not None and held.ready and held.length and not held.handles:
                    yield held

    async def _room(self, held: CachedSlice) -> bool:
        """Charge the slice's pages, dropping those nobody needs for it. False: no room, or it was evicted meanwhile."""
        cache = self._slices.cache
        while self.bytes + held.length > TUNING.primed_share * cache.pool.limit or not cache.charge(held.length):
            unneeded = self._first(self._order, held.length) or self._first(self._unplanned(), held.length)
            if not unneeded:
                return False
            await self._drop(unneeded)
        if held.ready:
            return True
        cache.pool.discharge(held.length)
        return False

    def _first(self, keys: Iterable[SliceKey], size: int) -> list[SliceKey]:
        return first_of(keys, size, lambda key: self._primed[key].length)

    def _unplanned(self) -> Iterator[SliceKey]:
        """Files that were never opened, of steps that the newest plan does not name: their readers went elsewhere."""
        kept, order = self._kept(), self._slices.cache.evictable.order
        return (key for key in self._primed if key not in kept and not order.plans(key[0]))

    def _farthest_first(self) -> list[SliceKey]:
        kept, order = self._kept(), self._slices.cache.evictable.order
        return sorted(self._primed, key=lambda key: (key not in kept, order.distance(key[0]), key[1]), reverse=True)

    def _kept(self) -> set[SliceKey]:
        """Files that are open, or that another reader will open: no plan names them."""
        return {held.key for held in self._slices.cache.opened()}.union(self._order.closed())

    def _enter(self, held: CachedSlice) -> None:
        # A file that was evicted before is not checked again: a kernel that evicts at once is not fought.
        place = -1 if self._table is None else self._table.enter(held.key, held.length)
        self._primed[held.key] = _Primed(held.length, place, checked=held.key in self._evicted)
        self.bytes += held.length

    async def _prime(self, batch: Sequence[CachedSlice]) -> None:
        ready = [held for held in batch if held.ready and held.key in self._primed]
        began_s = trio.current_time()
        stored = await self._store(ready)
        if tracing.ring is not None:
            seconds, size = trio.current_time() - began_s, sum(held.length for held in ready)
            steps = sorted({int(held.entry.step) for held in ready})
            tracing.ring.add("priming", f"{len(ready)} files", seconds, steps=steps, size=size, stored=sum(stored))
        for held in batch:
            if held not in ready:
                self._forget(held.key)  # evicted, or no longer planned, while room was made for another
        for held, done in zip(ready, stored, strict=True):
            if done:
                self._count(held)
                self._slices.release_copy(held)
            else:
                self._forget(held.key)
                self._refused.add(held.key)

    def _count(self, held: CachedSlice) -> None:
        counts = self._slices.counts
        counts.primed += held.length
        if held.key in self._evicted:
            self._evicted.discard(held.key)
            counts.reprimed_files += 1
        else:
            counts.primed_files += 1
            counts.bytes_delivered += held.length

    async def _store(self, batch: Sequence[CachedSlice]) -> list[bool]:
        """Which of them are in the page cache now."""
        work = [
            (
                self._pages.path(*held.key),
                [held.window(n, 0, min(BLOCK_BYTES, piece.length)) for n, piece in enumerate(held.pieces)],
            )
            for held in batch
        ]
        stored = await self.threads.call(lambda: [self._store_file(path, parts) for path, parts in work])
        return [False] * len(batch) if stored is None else stored

    def _store_file(self, path: Path, parts: Sequence[memoryview]) -> bool:
        try:
            inode = path.stat().st_ino
        except FileNotFoundError:
            return False  # not shown here (any more)
        offset = 0
        for part in parts:
            for start in range(0, len(part), CHUNK_BYTES):
                chunk = part[start : start + CHUNK_BYTES]
                self._pages.store_pages(inode, offset, chunk)
                offset += len(chunk)
        if offset >= CHUNK_BYTES:  # opening a smaller one again would cost more than its reader saves
            with suppress(OSError):  # evicted at once: found when its turn comes
                mark_used(path, offset)
        return True

    async def _drop(self, keys: Sequence[SliceKey]) -> None:
        paths = [self._pages.path(*key) for key in keys]
        for key in keys:
            self._forget(key)

        def drop() -> None:
            for path in paths:
                with suppress(FileNotFoundError):
                    drop_pages(path)

        await self.threads.call(drop)

    def _forget(self, key: SliceKey) -> None:
        primed = self._primed.pop(key, None)
        self._order.discard(key)
        if primed is not None:
            if self._table is not None:
                self._table.leave(primed.place)
            self.bytes -= primed.length
            self._slices.cache.pool.discharge(primed.length)
            self._slices.changed()
