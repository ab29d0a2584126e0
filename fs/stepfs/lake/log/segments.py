"""Index segments in memory: a small LRU, and one GET per segment for any number of waiting tasks.

Lookups of steps older than the log's tail come here. A segment of 512 steps × 64 slices is about 1 MB, so a mount of
a long lake keeps the few segments that its readers move through, not the history. One that is not stored yet may leave
memory like any other: the log has its steps until a snapshot covers it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from stepfs.errors import CorruptError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.keys import extent, index_prefix
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import Segment, StepEntry, decode_segment
from stepfs.store.api import Store

_BYTES_MAX: Final = 48 << 20  # `lone_entries` keeps 16 MiB besides
_KEPT_MIN: Final = 4

Rebuild = Callable[[SegmentIndex], Awaitable[Segment | None]]  # from the log; None: it was stored, or is lost


def segment_bytes(slices: int) -> int:
    """The memory of a segment, about."""
    return SEGMENT_STEPS * (400 + 24 * slices)


class Segments:
    """Loaded segments of one lake, least recently used first out once they exceed a byte budget.

    `in_thread`: decode in a worker thread. A segment takes 20 ms (64 slices) to 100 ms, and a mount's loop must answer
    meanwhile; programs without other tasks do better without.
    """

    def __init__(self, store: Store, identity: LakeIdentity, rebuild: Rebuild, *, bytes_max: int = _BYTES_MAX) -> None:
        self._store = store
        self._identity = identity
        self._rebuild = rebuild
        self.in_thread = False
        self._kept_max = 0
        self._loaded: OrderedDict[SegmentIndex, Segment] = OrderedDict()
        self._loading: dict[SegmentIndex, trio.Lock] = {}
        self.limit(bytes_max)

    def entry_if_loaded(self, step: Step) -> StepEntry | None:
        index = SegmentIndex(step // SEGMENT_STEPS)
        segment = self._loaded.get(index)
        if segment is None:
            return None
        self._loaded.move_to_end(index)
        return segment.entries[step % SEGMENT_STEPS]

    def get(self, index: SegmentIndex) -> Segment | None:
        return self._loaded.get(index)

    def remember(self, segment: Segment) -> None:
        self._loaded[segment.index] = segment
        self._loaded.move_to_end(segment.index)
        self._evict()

    def is_loading(self, index: SegmentIndex) -> bool:
        return index in self._loading

    def has_room(self) -> bool:
        return len(self._loaded) < self._kept_max

    def _evict(self) -> None:
        while len(self._loaded) > self._kept_max:
            self._loaded.popitem(last=False)

    def replace_by(self, other: Segments) -> None:
        """Take over the segments of another instance of the same lake, and drop all others."""
        self._loaded = other._loaded.copy()

    async def load(self, index: SegmentIndex, ref: tuple[int, bytes]) -> Segment:
        """From memory or the store, checked against its 16-byte reference; `CorruptError` if absent or another's."""
        lock = self._loading.setdefault(index, trio.Lock())
        async with lock:
            try:
                segment = self._loaded.get(index)
                if segment is None:
                    segment = self._checked(await self._found(index), index, ref)
                    self.remember(segment)
                return segment
            finally:
                if not lock.statistics().tasks_waiting:
                    self._loading.pop(index, None)

    async def peek(self, index: SegmentIndex, ref: tuple[int, bytes]) -> Segment:
        """As `load`, for a caller that moves through many segments once: fetched segments are not kept."""
        return self._loaded.get(index) or self._checked(await self._found(index), index, ref)

    def limit(self, bytes_max: int) -> None:
        """Keep at most this many bytes (and a few segments) from now on."""
        self._kept_max = max(_KEPT_MIN, bytes_max // segment_bytes(self._identity.slices))
        self._evict()

    def _checked(self, segment: Segment | None, index: SegmentIndex, ref: tuple[int, bytes]) -> Segment:
        key = extent(index_prefix(self._identity.lake_id), index)
        if segment is None:
            raise CorruptError(
                f"{key}: index segment is missing; restore it, or `stepfs fork` the lake around its steps with --skip"
            )
        if ref != (segment.entries[-1].time_ms, segment.digest[:8]):
            raise CorruptError(f"{key}: index segment belongs to another history")
        return segment

    async def load_unreferenced(self, index: SegmentIndex) -> Segment | None:
        """Load a segment to which the state may have dropped its reference (reclaim, when it lists leftovers).

        None if it is gone: another reclaimer has just deleted it.
        """
        return self._loaded.get(index) or await self._found(index)

    async def _found(self, index: SegmentIndex) -> Segment | None:
        """As stored, else from the log, else as another process has stored it meanwhile."""
        segment = await self._fetch(index)
        if segment is not None:
            return segment
        try:
            return await self._rebuild(index) or await self._fetch(index)
        except CorruptError:
            segment = await self._fetch(index)
            if segment is None:
                raise
            return segment

    async def _fetch(self, index: SegmentIndex) -> Segment | None:
        key = extent(index_prefix(self._identity.lake_id), index)
        data = await self._store.get(key)
        if data is None:
            return None
        decode = partial(decode_segment, data, key)
        lake_id, segment = await trio.to_thread.run_sync(decode) if self.in_thread else decode()
        if (lake_id, segment.index) != (self._identity.lake_id, index):
            raise CorruptError(f"{key}: index segment belongs to another lake")
        return segment
