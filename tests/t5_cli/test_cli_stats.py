"""`stepfs stats`: sums by producer and hour, as text and JSON."""

from __future__ import annotations

import json_schemas
import pytest
from lakes import SLICES, commit, payloads, stepfs

from stepfs.cli.commands.stats import HOUR_MS, LakeStats
from stepfs.format.ids import Epoch, Step, Version
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import Descriptor, SliceRef, pack_slices


def entry(step: int, producer: str, time_ms: int, size: int = 100, records: int = 2) -> StepEntry:
    packed, blocks = pack_slices([SliceRef(64, size, 0, records, ())])
    tgb = Descriptor(0, "k", 10_000, step, packed, blocks)
    return StepEntry(Step(step), Version(step), time_ms, producer, Epoch(1), tgb)


def test_sums_are_by_producer_and_by_the_hour_of_the_commit() -> None:
    stats = LakeStats()
    for step, (producer, time_ms) in enumerate(
        [("a", HOUR_MS - 1), ("b", HOUR_MS), ("a", HOUR_MS), ("a", 3 * HOUR_MS + 1)]
    ):
        stats.add(entry(step, producer, time_ms))
    assert stats.whole.amounts() == {"steps": 4, "bytes": 400, "records": 8}
    assert {name: sums.steps for name, sums in stats.producers.items()} == {"a": 3, "b": 1}
    assert {key: sums.payload_bytes for key, sums in stats.hours.items()} == {
        (0, "a"): 100, (1, "b"): 100, (1, "a"): 100, (3, "a"): 100,
    }  # fmt: skip
    assert {hour: sums.steps for hour, sums in stats.by_hour().items()} == {0: 1, 1: 2, 3: 1}
    assert stats.producers["b"].bytes_per_s is None, "one moment is no span"
    assert stats.producers["a"].bytes_per_s == pytest.approx(300_000 / (2 * HOUR_MS + 2))


def test_the_document_agrees_with_the_lake(file_url: str) -> None:
    stepfs("init", file_url, "--slices", SLICES)
    empty = stepfs("stats", file_url, "--json").document
    json_schemas.check("stats", empty)
    assert (empty["steps"], empty["producers"], empty["first_time"]) == (0, {}, None)
    commit(file_url, range(4))
    commit(file_url, range(3), producer_id="other")
    document = stepfs("stats", file_url, "--json").document
    json_schemas.check("stats", document)
    size = sum(sum(map(len, payloads(step))) for step in [*range(4), *range(3)])
    assert (document["steps"], document["bytes"], document["records"]) == (7, size, 7 * SLICES)
    assert (document["total_bytes"], document["total_records"]) == (size, 7 * SLICES)
    assert {name: sums["steps"] for name, sums in document["producers"].items()} == {"tok-0": 4, "other": 3}
    assert sum(hour["steps"] for hour in document["hours"]) == 7
    assert document["first_time"] <= document["last_time"]
    page = stepfs("stats", file_url).out
    assert page.startswith("live      7 steps, ")
    assert [line.split()[:2] for line in page.splitlines() if line.startswith("tok-0")] == [["tok-0", "4"]]


def test_reclaimed_steps_count_in_the_totals_alone(file_url: str) -> None:
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(5))
    stepfs("checkpoint", file_url, "--group", "g", "--new-group", 3)
    assert stepfs("reclaim", file_url).code == 0
    document = stepfs("stats", file_url, "--json").document
    assert (document["first_step"], document["steps"], document["next_step"]) == (3, 2, 5)
    assert document["total_records"] == 5 * SLICES
