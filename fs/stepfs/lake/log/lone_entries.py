"""Index entries of steps that are opened out of order: one small ranged GET each, instead of their whole segment.

An optimisation only: a missing or damaged entry is read from the segment, which every lake has. Three rules decide
when the whole segment is the better choice:
* a step beside one of the last requested steps is part of a scan (`ls -R`, a reader that starts);
* the segment is being loaded anyway;
* steps of the segment were requested so often that its bytes cost no more than `SEGMENT_SHARE_BYTES` for each request,
and it displaces no other segment. From then on its steps cost no request.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError, StepfsError
from stepfs.format.descriptor import SLICE_ENTRY_BYTES
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.keys import entries_prefix, extent
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import Segment, StepEntry
from stepfs.format.step_records import (
    DIGEST_BYTES,
    Elsewhere,
    StepRecord,
    decode_step_record,
    encode_step_records,
    place_of,
    stride_bytes,
)
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.log")

SEGMENT_SHARE_BYTES: Final = 16 << 10
_BYTES_MAX: Final = 16 << 20
_OBJECT_BYTES: Final = 1024  # memory of an entry besides its slices
_RECENT_STEPS: Final = 16
_BESIDE_STEPS: Final = 2


class LoneEntries:
    """Entries of one lake that were read one by one, least recently used first out."""

    def __init__(self, store: Store, identity: LakeIdentity, *, bytes_max: int = _BYTES_MAX) -> None:
        self._store = store
        self._identity = identity
        self._stride = stride_bytes(identity.slices)
        self.kept_max = max(16, bytes_max // (_OBJECT_BYTES + SLICE_ENTRY_BYTES * identity.slices))
        self._entries: OrderedDict[Step, StepEntry] = OrderedDict()
        self._recent: deque[Step] = deque(maxlen=_RECENT_STEPS)
        self._asked: Counter[SegmentIndex] = Counter()
        self._unusable: set[SegmentIndex] = set()  # the object is missing or damaged
        self._history = 0  # counts calls of `clear`

    def get(self, step: Step) -> StepEntry | None:
        entry = self._entries.get(step)
        if entry is not None:
            self._entries.move_to_end(step)
        return entry

    def note(self, step: Step) -> None:
        """Note a request for a step whose segment is not in memory."""
        self._recent.append(step)
        self._asked[SegmentIndex(step // SEGMENT_STEPS)] += 1

    def is_scan(self, step: Step) -> bool:
        """Whether a neighbour of the step was requested a moment ago."""
        return any(0 < abs(step - other) <= _BESIDE_STEPS for other in self._recent)

    def pays_whole(self, index: SegmentIndex) -> bool:
        """Whether steps of the segment were requested so often that loading it whole would have cost no more."""
        return self._asked[index] * SEGMENT_SHARE_BYTES >= SEGMENT_STEPS * self._stride

    async def load(self, step: Step, ref: tuple[int, bytes]) -> StepEntry | None:
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
            record = None
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

    async def _read(self, step: Step) -> StepRecord | None:
        found = await self._read_at(step, place_of(step, self._identity.slices), self._stride)
        if isinstance(found, Elsewhere):
            found = await self._read_at(step, found.offset, found.size)
        return None if isinstance(found, Elsewhere) else found

    async def _read_at(self, step: Step, offset: int, size: int) -> StepRecord | Elsewhere | None:
        key = extent(entries_prefix(self._identity.lake_id), SegmentIndex(step // SEGMENT_STEPS))
        buffer = bytearray(size)
        got = await self._store.read_into(key, offset, memoryview(buffer))
        if got is None:
            return None
        return decode_step_record(memoryview(buffer)[:got], f"{key}: step {step}")

    def _belongs(self, record: StepRecord, step: Step, ref: tuple[int, bytes]) -> bool:
        found = record.lake_id, record.entry.step, record.digest
        return found == (self._identity.lake_id, step, ref[1][:DIGEST_BYTES])


async def write_step_records(store: Store, lake_id: str, slices: int, segment: Segment) -> None:
    """Write the `entries/` object of a segment that this process has just written. Never fails: it is an optimisation.

    One attempt: another writer of the same name wrote the same bytes.
    """
    key = extent(entries_prefix(lake_id), segment.index)
    data = encode_step_records(lake_id, slices, segment)
    if data is None:
        return
    try:
        await store.create(key, data)
    except StepfsError as error:
        _log.info("%s is not written, so reading in random order reads whole segments: %s", key, error)
