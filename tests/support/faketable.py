"""A lake without a store: entries made up on demand, some of them "not loaded", and slices held in memory."""

from __future__ import annotations

from dataclasses import replace

import trio
from crc32c import crc32c

from stepfs.data.slices import Shelter
from stepfs.errors import AbsentError, NewerFormatError, OtherHistoryError
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SEGMENT_STEPS, Epoch, SegmentIndex, SliceIndex, Step, Version
from stepfs.format.snapshot import REF_BYTES, StepEntry, genesis
from stepfs.format.tgb import Descriptor, SliceRef, pack_slices

LAKE_ID = "0123456789abcdef" * 2
CREATED_MS = 1_700_000_000_000


def payload(step: int, index: int) -> bytes:
    return b"%d/%d;" % (step, index) * (1 + (step + index) % 5)


class FakeTable:
    """`LogReader` as the view and the mount see it; tests move it by assigning."""

    lone_entries_max = 1000

    def __init__(self, *, slices: int = 2, ext: str = ".pt") -> None:
        self.identity = LakeIdentity(LAKE_ID, Grid(slices), ext, CREATED_MS)
        self.state = genesis(LAKE_ID, slices)
        self.first_live_step = Step(0)
        self.unloaded: set[int] = set()
        self.loads: list[int] = []
        self.load_gate: trio.Event | None = None
        self.load_errors: list[Exception] = []
        self.astray: OtherHistoryError | None = None
        self.newer: NewerFormatError | None = None

    def commit(self, count: int = 1) -> None:
        now = CREATED_MS + 1000 * (self.state.version + 2)
        self.state = replace(
            self.state,
            version=Version(self.state.version + 1),
            next_step=Step(self.state.next_step + count),
            time_ms=now,
        )

    async def check_history(self) -> None:
        """The log of a fake is never another one."""

    def unload(self, segments: int) -> None:
        """The first so many segments are sealed and not in memory."""
        self.unloaded = set(range(segments * SEGMENT_STEPS))
        self.state = replace(self.state, first_segment=SegmentIndex(0), segment_refs=bytes(segments * REF_BYTES))

    def seal(self) -> None:
        self.state = replace(self.state, version=Version(self.state.version + 1), sealed=True)

    def make_entry(self, step: int) -> StepEntry:
        offset, refs = 64, []
        for index in range(self.identity.slices):
            data = payload(step, index)
            refs.append(SliceRef(offset, len(data), crc32c(data), 1, ()))
            offset += len(data) + -len(data) % 64
        packed, blocks = pack_slices(refs)
        tgb = Descriptor(0, f"{LAKE_ID}/data/x/{step}.tgb", offset, step, packed, blocks)
        return StepEntry(Step(step), Version(step), CREATED_MS + 1000 * (step + 1), "tok-0", Epoch(1), tgb)

    def entry_if_loaded(self, step: Step) -> StepEntry | None:
        if not self.first_live_step <= step < self.state.next_step or step in self.unloaded:
            return None
        return self.make_entry(step)

    async def entry(self, step: Step) -> StepEntry:
        self.loads.append(step)
        if self.load_gate is not None:
            await self.load_gate.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self.load_errors:
            raise self.load_errors.pop(0)
        self.unloaded.discard(step)
        found = self.entry_if_loaded(step)
        if found is None:
            raise AbsentError(f"step {step} is not in the lake")
        return found

    async def lone_entry(self, step: Step) -> StepEntry:
        return await self.entry(step)

    def time_ms(self, step: Step) -> int:
        if step in self.unloaded:  # the time of its segment's last step
            step = Step((step // SEGMENT_STEPS + 1) * SEGMENT_STEPS - 1)
        return CREATED_MS + 1000 * (step + 1)


class FakeHandle:
    def __init__(self, slices: FakeSlices, entry: StepEntry, index: SliceIndex) -> None:
        self._slices = slices
        self._bytes = payload(entry.step, index)
        self.length = len(self._bytes)

    async def read(self, offset: int, size: int) -> memoryview:
        with self._slices.shelter.wait():
            await trio.lowlevel.checkpoint()
        if self._slices.read_error is not None:
            raise self._slices.read_error
        return memoryview(self._bytes)[offset : offset + size]

    def close(self) -> None:
        self._slices.open_handles -= 1


class FakeSlices:
    """The data door, serving `payload(step, index)`."""

    def __init__(self) -> None:
        self.shelter = Shelter()
        self.open_handles = 0
        self.opened: list[tuple[int, int]] = []
        self.read_error: Exception | None = None

    def open(self, entry: StepEntry, index: SliceIndex) -> FakeHandle:
        self.open_handles += 1
        self.opened.append((entry.step, index))
        return FakeHandle(self, entry, index)
