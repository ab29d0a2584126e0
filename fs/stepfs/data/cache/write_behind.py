"""Write-behind to the disk cache: one slice at a time, never in a reader's way.

A full or failing disk is not an error of the mount: it warns once, rests, and everything goes on from memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.data.blocks import HeldSlice
from stepfs.data.cache.disk import DiskCache
from stepfs.data.counters import DataCounts
from stepfs.data.roles import Role
from stepfs.format.ids import BLOCK_BYTES, SliceKey, Step
from stepfs.format.tgb import SliceRef
from stepfs.store.api import Progress

_log = logging.getLogger("stepfs.data")
_QUEUE_MAX: Final = 4096  # slices; beyond, the disk is the slower one and the oldest are not worth it
_REST_S: Final = 60.0


@dataclass(eq=False)
class WriteBehind:
    """The disk side of a mount's slices; every method may be called without a disk, and then does nothing."""

    disk: DiskCache | None
    counts: DataCounts
    changed: Callable[[HeldSlice], None]  # called for every slice that became loadable from disk
    is_pinned: Callable[[SliceKey], bool]  # slices that are read: not displaced
    is_last_copy: Callable[[SliceKey], bool]  # slices only on disk: not displaced by others ahead

    def __post_init__(self) -> None:
        self._queue: deque[HeldSlice] = deque(maxlen=_QUEUE_MAX)
        self._leaving: list[str] = []
        self._wake = trio.Event()
        self._rest_until = float("-inf")
        self._floor = Step(0)
        self._warned = False
        if self.disk is not None:
            self.counts.adopted_files += self.disk.adopted

    def holds(self, held: HeldSlice) -> bool:
        """Whether the slice can be loaded from disk."""
        return self.disk is not None and self.disk.holds(held.key, held.ref)

    def unpinned(self, held: HeldSlice, *, consumed: bool) -> None:
        """A slice is pinned no more; `consumed` if no other reader is expected."""
        if self.disk is not None:
            if consumed:
                self.disk.consume(held.key)
            if held.key[0] < self._floor:
                self.forget_below(self._floor)

    def enqueue(self, held: HeldSlice) -> None:
        """A slice is complete in memory: keep a copy, unless it is being read already."""
        self._floor = min(self._floor, held.entry.step)
        if self.disk is not None and held.length and not held.role.pinned and not self.holds(held):
            self._queue.append(held)
            self._wake.set()

    def forget_below(self, step: Step) -> None:
        if self.disk is not None:
            self._floor = step
            self._queue_removal(self.disk.forget_below(step, self.is_pinned))

    async def load(self, held: HeldSlice, offset: int, buffer: memoryview, landed: Progress) -> int:
        """Bytes from `offset` of the slice into `buffer`: how many; unverified, but `landed` sees them in the thread."""
        disk = self.disk
        assert disk is not None

        def load() -> int:
            got = disk.read_into(held.key, offset, buffer)
            landed(got)
            return got

        return await trio.to_thread.run_sync(load)

    def reject(self, held: HeldSlice, problem: str) -> None:
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
                    await trio.to_thread.run_sync(self.disk.remove, names)
                except OSError as error:
                    self._rest(error)
            elif self._queue:
                await self._write(self.disk, self._queue.popleft())
            else:
                await self._wake.wait()

    async def _write(self, disk: DiskCache, held: HeldSlice) -> None:
        key, ref = held.key, held.ref
        if (
            trio.current_time() < self._rest_until
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
            name = await trio.to_thread.run_sync(disk.write, key, ref, parts)
        except OSError as error:
            self._rest(error)
            return
        finally:
            del parts  # they keep the buffers in sight
        self._enter(disk, key, name, ref)
        if disk.holds(key, ref):
            self.changed(held)

    def _rest(self, error: OSError) -> None:
        self._rest_until = trio.current_time() + _REST_S
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
