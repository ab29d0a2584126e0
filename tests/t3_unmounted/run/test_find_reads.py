"""`find` in a long log: how many objects it reads. The log is computed where it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from crc32c import crc32c
from payload_samples import framed

from stepfs.errors import AbsentError
from stepfs.format.commit import COMMIT_ID_BYTES, DIGEST_BYTES, Commit, CommitKind, encode_commit
from stepfs.format.grid import Grid
from stepfs.format.ids import SEGMENT_STEPS, Epoch, Step, Version
from stepfs.format.keys import log_prefix, number_of, plan_key, plans_prefix, source_listing_key
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor, SliceRef, pack_slices
from stepfs.lake.kept_plans import LineageReader
from stepfs_producer.commit.uploads import pack_position
from stepfs_producer.plan.file.digest import plan_digest, plan_text
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.step import SourceState, State
from stepfs_producer.run.history import find as rooms
from stepfs_producer.run.history.find import Absence, Found, Occurrence, RecordQuery, find_record
from stepfs_producer.run.history.positions import Positions
from stepfs_producer.run.prepare import source_specs
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.sources.reading import read_block

STEPS = 20_000
RECORDS = 8_000  # two epochs and a half
READS_MAX = 45  # of three epochs, where sources are drawn evenly
UNEVEN_READS_MAX = 70
LAKE_ID = "ab" * 16


class LongLog:
    """The log of a planned lake; it counts the objects that a reader of it would get."""

    def __init__(self, directory: Path, *, per_commit: int = 1, first_live: int = 0, even: bool = True) -> None:
        self._even = even
        path = directory / "lines.txt"
        path.write_text("".join(f"{number}\n" for number in range(RECORDS)))
        plan = parsed_plan(
            {
                "output": {"mesh": "dp=1", "sequence_length": 8},
                "sources": {"prose": {"format": "text", "records": "lines", "files": [str(path)]}},
            }
        )
        self.digest = plan_digest(plan)
        spec = source_specs(plan)["prose"]
        self.listing = list_corpus(spec)
        layout = Layout(spec, self.listing)
        self.offsets = [read_block(spec, layout.task(BlockAddress(epoch, 0, 0))).records.offsets for epoch in range(3)]
        self.reads: list[str] = []
        self._objects: Mapping[str, bytes] = {
            plan_key(LAKE_ID, self.digest): plan_text(plan).encode(),
            source_listing_key(LAKE_ID, self.listing.digest, 0): self.listing.to_shards()[0],
        }
        self._per_commit = per_commit
        self._segments: set[int] = set()
        self.first_live_step = Step(first_live)
        self.identity = SimpleNamespace(lake_id=LAKE_ID, grid=Grid(1), ext=".safetensors")
        position = pack_position(self.at(STEPS).position())
        newest = SimpleNamespace(position=position, version=Version((STEPS - 1) // per_commit))
        self.state = SimpleNamespace(origins=(), next_step=Step(STEPS), producers={"plan": newest})
        self.store = self
        self.url = "memory://"

    def taken(self, step: int) -> int:
        """Records that stand in the steps before one: one each, or ever more."""
        return step if self._even else step * step // STEPS

    def at(self, step: int) -> State:
        epoch, taken = divmod(self.taken(step), RECORDS)
        source = SourceState("i", self.listing.digest, epoch=epoch, taken=taken, tokens=step)
        return State(self.digest, step, {"prose": source})

    async def entry(self, step: Step) -> StepEntry:
        if step // SEGMENT_STEPS not in self._segments:
            self._segments.add(step // SEGMENT_STEPS)
            self.reads.append(f"segment {step // SEGMENT_STEPS}")
        payload = self._payload(step)
        packed, blocks = pack_slices([SliceRef(0, len(payload), crc32c(payload), 1, ())])
        tgb = Descriptor(0, f"step {step}", len(payload), step, packed, blocks)
        version = Version(step // self._per_commit)
        return StepEntry(Step(step), version, 0, "plan", Epoch(1), tgb)

    async def get(self, key: str) -> bytes | None:
        self.reads.append(key)
        version = number_of(log_prefix(LAKE_ID), key)
        return self._objects.get(key) if version is None else await self._commit(version)

    async def list(self, prefix: str) -> list:
        assert prefix == plans_prefix(LAKE_ID)
        return []

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        self.reads.append(key)
        payload = self._payload(int(key.split()[1]))
        buffer[:] = payload[offset : offset + len(buffer)]
        return len(buffer)

    def _payload(self, step: int) -> bytes:
        rows = []
        for record in range(self.taken(step), self.taken(step + 1)):
            epoch, index = divmod(record, RECORDS)
            rows.append([0, 0, 1, 0, epoch, 0, int(self.offsets[epoch][index]), 0])
        table = np.array(rows, "<i8").reshape(-1, 8)
        header = {
            "__metadata__": {"sources": json.dumps(["prose"])},
            "input_ids": {"dtype": "I64", "shape": [1, 1], "data_offsets": [0, 8]},
            "spans": {"dtype": "I64", "shape": list(table.shape), "data_offsets": [8, 8 + table.nbytes]},
        }
        return framed(header, bytes(8) + table.tobytes())

    async def _commit(self, version: int) -> bytes:
        first = version * self._per_commit
        steps = range(first, min(first + self._per_commit, int(self.state.next_step)))
        tgbs = tuple([(await self.entry(Step(step))).tgb for step in steps])
        return encode_commit(
            Commit(
                version=Version(version), lake_id=LAKE_ID, kind=CommitKind.DATA, commit_id=bytes(COMMIT_ID_BYTES),
                prev_digest=bytes(DIGEST_BYTES), producer_id="plan", epoch=Epoch(1),
                incarnation=bytes(COMMIT_ID_BYTES), next_seq=steps.stop,
                position=pack_position(self.at(steps.stop).position()), first_step=Step(first), tgbs=tgbs, time_ms=0,
                total_bytes=0, total_records=0,
            )
        )  # fmt: skip


@pytest.fixture
def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every block of the source that is read."""
    read: list[object] = []

    def counted(spec, task):
        read.append(task.place)
        return read_block(spec, task)

    monkeypatch.setattr(rooms, "read_block", counted)
    return read


async def found_in(long: LongLog, record: int) -> list[Found]:
    async def holds(_tgb: Descriptor, _state: object) -> LongLog:
        return long

    origins = SimpleNamespace(of=holds)
    return await find_record(long, LineageReader(long, origins), RecordQuery("prose", "lines.txt", record, "."))


@pytest.mark.parametrize(("per_commit", "even"), [(1, True), (3, True), (1, False)])
async def test_few_objects_are_read_of_many_steps(tmp_path: Path, per_commit, even, blocks_read) -> None:
    long = LongLog(tmp_path, per_commit=per_commit, even=even)
    taken = np.array([long.taken(step + 1) for step in range(STEPS)])
    for record in [long.offsets[0][0], long.offsets[1][-1], long.offsets[0][777]]:
        long.reads.clear()
        long._segments.clear()
        blocks_read.clear()
        found = await found_in(long, int(record))
        numbers = [epoch * RECORDS + int(np.flatnonzero(long.offsets[epoch] == record)[0]) for epoch in range(3)]
        steps = [int(np.searchsorted(taken, number, side="right")) for number in numbers]
        assert [one.step for one in found if isinstance(one, Occurrence)] == [one for one in steps if one < STEPS]
        assert [one.why for one in found[2:] if isinstance(one, Absence)] == ["not drawn yet"] * (steps[2] >= STEPS)
        assert len(long.reads) <= (READS_MAX if even else UNEVEN_READS_MAX), long.reads
        assert len(blocks_read) == 3


async def test_reclaimed_steps_are_named(tmp_path: Path) -> None:
    long = LongLog(tmp_path, first_live=2_000)
    [gone, *found] = await found_in(long, int(long.offsets[0][1_999]))
    assert isinstance(gone, Absence)
    assert gone.why == "no step from 2000 on holds it; those before were reclaimed"
    assert {type(one) for one in found} == {Occurrence} or found[-1].why == "not drawn yet"
    [there, *_] = await found_in(long, int(long.offsets[0][2_000]))
    assert there.step == 2_000


async def test_a_place_without_a_record_and_a_lost_listing_are_named(tmp_path: Path) -> None:
    long = LongLog(tmp_path)
    with pytest.raises(AbsentError, match=r"0/lines.txt has no record at 1; `stepfs-produce lineage` prints"):
        await found_in(long, 1)
    long._objects = {}
    with pytest.raises(AbsentError, match=r"list of files of source prose is not in the lake; restore .* sources/"):
        await found_in(long, 0)


class Shared(LongLog):
    """Every 10,000th step is of the plan, until step 60,000; the others are of another producer."""

    looks = 0
    plain: StepEntry

    async def entry(self, step: Step) -> StepEntry:
        self.looks += 1
        mine = step % 10_000 == 9_999 and step < 60_000
        return replace(self.plain, step=step, version=Version(step), producer_id="plan" if mine else "other")


async def test_steps_of_other_producers_are_looked_at_once(tmp_path: Path) -> None:
    log = Shared(tmp_path)
    log.plain = await LongLog.entry(log, Step(0))
    log.state.next_step, log.state.producers["plan"].version = Step(100_000), Version(59_999)
    positions = Positions(log, "plan")
    for probe in [50_000, 0, 25_000, 12_500, 18_000, 21_000, 20_001] * 3:
        found = await positions.at(probe)
        assert found.steps.start == probe // 10_000 * 10_000 + 9_999
    before = await positions.before(25_000)
    assert before.steps.start == 19_999
    assert log.looks <= 60_000
    assert await positions.at(60_000) is await positions.at(99_000) is None
    assert log.looks <= 60_000 + 2 * SEGMENT_STEPS, "behind the producer's newest commit there is none"


async def test_a_source_that_ends_before_its_first_record_has_no_answer(tmp_path: Path, monkeypatch) -> None:
    long = LongLog(tmp_path)
    monkeypatch.setattr(rooms._Corpus, "placed", lambda *_: None)
    assert await found_in(long, 0) == []
