"""The index of old steps: segments in memory, each read by one GET for any number of waiting tasks, or single entries."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format import snapshot
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.keys import extent, index_prefix
from stepfs.format.tgb import SLICE_ENTRY_BYTES
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.log")

SEGMENT_SHARE_BYTES: Final = 16 << 10
_SEGMENTS_BYTES_MAX: Final = 48 << 20
_ENTRIES_BYTES_MAX: Final = 16 << 20
_KEPT_MIN: Final = 4
_OBJECT_BYTES: Final = 1024  # memory of an entry besides its slices
_RECENT_STEPS: Final = 16
_BESIDE_STEPS: Final = 2

Rebuild = Callable[[SegmentIndex], Awaitable[snapshot.Segment | None]]  # from the log; None: it was stored, or is lost


def segment_bytes(slices: int) -> int:
    """The memory of a segment, about."""
    return SEGMENT_STEPS * (400 + 24 * slices)


class Segments:
    """Loaded segments of one lake, least recently used first out once they exceed a byte budget.

    `in_thread`: decode in a worker thread. A segment takes 20 ms (64 slices) to 100 ms, and a mount's loop must answer
    meanwhile; programs without other tasks do better without.
    """

    def __init__(self, store: Store, identity: LakeIdentity, rebuild: Rebuild) -> None:
        self._store = store
        self._identity = identity
        self._rebuild = rebuild
        self.in_thread = False
        self._kept_max = 0
        self._loaded: OrderedDict[SegmentIndex, snapshot.Segment] = OrderedDict()
        self._loading: dict[SegmentIndex, trio.Lock] = {}
        self.limit(_SEGMENTS_BYTES_MAX)

    def entry_if_loaded(self, step: Step) -> snapshot.StepEntry | None:
        index = SegmentIndex(step // SEGMENT_STEPS)
        segment = self._loaded.get(index)
        if segment is None:
            return None
        self._loaded.move_to_end(index)
        return segment.entries[step % SEGMENT_STEPS]

    def get(self, index: SegmentIndex) -> snapshot.Segment | None:
        return self._loaded.get(index)

    def remember(self, segment: snapshot.Segment) -> None:
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

    async def load(self, index: SegmentIndex, ref: tuple[int, bytes]) -> snapshot.Segment:
        """A segment, checked against its 16-byte reference; `CorruptError` if it is absent or another's."""
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

    async def peek(self, index: SegmentIndex, ref: tuple[int, bytes]) -> snapshot.Segment:
        """The same as `load`, but fetched segments are not kept: the caller moves through many of them once."""
        return self._loaded.get(index) or self._checked(await self._found(index), index, ref)

    async def peek_stored(self, index: SegmentIndex, ref: tuple[int, bytes]) -> tuple[snapshot.Segment, bytes]:
        """The same and the bytes of its object, for a copy that keeps what a later version has put there."""
        stored = await self._stored(index)
        if stored is not None:
            return self._checked(stored[0], index, ref), stored[1]
        segment = await self.peek(index, ref)
        return segment, snapshot.encode_segment(self._identity.lake_id, self._identity.slices, segment)

    def limit(self, bytes_max: int) -> None:
        """Keep at most this many bytes (and a few segments) from now on."""
        self._kept_max = max(_KEPT_MIN, bytes_max // segment_bytes(self._identity.slices))
        self._evict()

    def _checked(
        self, segment: snapshot.Segment | None, index: SegmentIndex, ref: tuple[int, bytes]
    ) -> snapshot.Segment:
        key = extent(index_prefix(self._identity.lake_id), index)
        if segment is None:
            raise CorruptError(
                f"{key}: index segment is missing; restore it, or `stepfs fork` the lake around its steps with --skip"
            )
        if ref != (segment.entries[-1].time_ms, segment.digest):
            raise CorruptError(f"{key}: index segment belongs to another history")
        return segment

    async def load_unreferenced(self, index: SegmentIndex) -> snapshot.Segment | None:
        """Load a segment to which the state may have dropped its reference (reclaim, when it lists leftovers).

        None if it is gone: another reclaimer has just deleted it.
        """
        return self._loaded.get(index) or await self._found(index)

    async def _found(self, index: SegmentIndex) -> snapshot.Segment | None:
        """The segment that is stored, else one made from the log, else the one that another process has stored meanwhile."""
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

    async def _fetch(self, index: SegmentIndex) -> snapshot.Segment | None:
        stored = await self._stored(index)
        return None if stored is None else stored[0]

    async def _stored(self, index: SegmentIndex) -> tuple[snapshot.Segment, bytes] | None:
        key = extent(index_prefix(self._identity.lake_id), index)
        data = await self._store.get(key, bytes_max=snapshot.SEGMENT_BYTES_MAX)
        if data is None:
            return None
        decode = partial(snapshot.decode_segment, data, self._identity.slices, key)
        lake_id, segment = await trio.to_thread.run_sync(decode) if self.in_thread else decode()
        if (lake_id, segment.index) != (self._identity.lake_id, index):
            raise CorruptError(f"{key}: index segment belongs to another lake")
        return segment, data


class LoneEntries:
    """Entries of one lake that were read one by one, least recently used first out."""

    def __init__(self, store: Store, identity: LakeIdentity, *, bytes_max: int = _ENTRIES_BYTES_MAX) -> None:
        self._store = store
        self._identity = identity
        self._stride = snapshot.stride_bytes(identity.slices)
        self.kept_max = max(16, bytes_max // (_OBJECT_BYTES + SLICE_ENTRY_BYTES * identity.slices))
        self._entries: OrderedDict[Step, snapshot.StepEntry] = OrderedDict()
        self._recent: deque[Step] = deque(maxlen=_RECENT_STEPS)
        self._asked: Counter[SegmentIndex] = Counter()
        self._unusable: set[SegmentIndex] = set()  # not stored yet, or of another history
        self._history = 0  # counts calls of `clear`

    def get(self, step: Step) -> snapshot.StepEntry | None:
        entry = self._entries.get(step)
        if entry is not None:
            self._entries.move_to_end(step)
        return entry

    def note(self, step: Step) -> None:
        self._recent.append(step)
        self._asked[SegmentIndex(step // SEGMENT_STEPS)] += 1

    def is_scan(self, step: Step) -> bool:
        """Whether a neighbour of the step was requested a moment ago."""
        return any(0 < abs(step - other) <= _BESIDE_STEPS for other in self._recent)

    def pays_whole(self, index: SegmentIndex) -> bool:
        """Whether steps of the segment were requested so often that loading it whole would have cost no more."""
        return self._asked[index] * SEGMENT_SHARE_BYTES >= SEGMENT_STEPS * self._stride

    async def load(self, step: Step, ref: tuple[int, bytes]) -> snapshot.StepEntry | None:
        """Read one entry, checked against its segment's 16-byte reference; None: read the segment.

        `StoreUnreachableError`, `RefusedError` as for any object.
        """
        index = SegmentIndex(step // SEGMENT_STEPS)
        if index in self._unusable:
            return None
        history = self._history
        try:
            record = await self._read(step)
        except (CorruptError, NewerFormatError) as error:
            _log.info("%s; its segment is read instead", error)
            return None
        if history != self._history:
            return None
        if record is None or not self._belongs(record, step, ref):
            self._unusable.add(index)
            return None
        self._entries[step] = record.entry
        while len(self._entries) > self.kept_max:
            self._entries.popitem(last=False)
        return record.entry

    def clear(self) -> None:
        """Forget everything: the lake's history may differ from the one that was read."""
        self._history += 1
        self._entries.clear()
        self._asked.clear()
        self._unusable.clear()

    def forget_segment(self, index: SegmentIndex) -> None:
        """Drop the entries of a segment that is now in memory as a whole."""
        self._asked.pop(index, None)
        for step in range(index * SEGMENT_STEPS, (index + 1) * SEGMENT_STEPS):
            self._entries.pop(Step(step), None)

    async def _read(self, step: Step) -> snapshot.StepRecord | None:
        found = await self._read_at(step, snapshot.place_of(step, self._identity.slices), self._stride)
        if isinstance(found, snapshot.OverflowPointer):
            found = await self._read_at(step, found.offset, found.size)
        return None if isinstance(found, snapshot.OverflowPointer) else found

    async def _read_at(
        self, step: Step, offset: int, size: int
    ) -> snapshot.StepRecord | snapshot.OverflowPointer | None:
        key = extent(index_prefix(self._identity.lake_id), SegmentIndex(step // SEGMENT_STEPS))
        buffer = bytearray(size)
        got = await self._store.read_into(key, offset, memoryview(buffer))
        if got is None:
            return None
        return snapshot.decode_step_record(memoryview(buffer)[:got], f"{key}: step {step}")

    def _belongs(self, record: snapshot.StepRecord, step: Step, ref: tuple[int, bytes]) -> bool:
        found = record.lake_id, record.entry.step, record.digest
        return found == (self._identity.lake_id, step, ref[1])
