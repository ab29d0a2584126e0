"""A trace: what is in it, by the rules that torch.profiler's own files keep, on its clock."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import time
from collections import defaultdict

import pytest
from at_work import at_work
from data_doubles import read_all, world_of
from torch.profiler import ProfilerActivity, profile, record_function

import stepfs
from stepfs._internal import tracing
from stepfs._internal.tracing import Event, Recording
from stepfs.data.slices import Slices
from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError
from stepfs.format.ids import SliceIndex

MIB = 1 << 20


def check(document):
    """The rules: events are named, complete and in one piece; on one row they do not overlap but by nesting."""
    assert {"schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "traceEvents"} <= document.keys()
    rows = defaultdict(list)
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert event["ph"] in {"X", "M", "i", "s", "f"}
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "M":
            assert event["args"]
    for spans in rows.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for (_, before), (begins, ends) in itertools.pairwise(spans):
            assert begins >= before - 0.5 or ends <= before + 0.5  # half a microsecond: doubles
    return document


def tracks(document):
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in document["traceEvents"]:
        if event.get("cat") == "stepfs":
            found[named[event["pid"], event["tid"]].partition(" (")[0]].append(event)
    return found


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
async def test_a_planted_delay_is_found_under_its_track_and_step(nursery, autojump_clock, tmp_path, name):
    world = world_of(6, MIB, MIB)
    world.store.behave = lambda number, *_: 0.3 if number == 7 else 0.001
    slices = await at_work(nursery, Slices(world.store, memory_bytes=3 * MIB))
    with stepfs.trace(tmp_path / name):
        for step, index in itertools.product(range(6), range(2)):
            handle = slices.open(world.entries[step], SliceIndex(index))
            await read_all(handle)
            handle.close()
    assert tracing.ring is None
    data = (tmp_path / name).read_bytes()
    document = check(json.loads(gzip.decompress(data) if name.endswith(".gz") else data))
    found = tracks(document)
    (slow,) = [event for event in found["fetches"] if event["dur"] > 100_000]
    assert (slow["name"], slow["args"]["slices"], slow["dur"]) == ("GET step 3", [1], pytest.approx(300_000, rel=0.01))
    (wait,) = [event for event in found["slice 1: waits"] if event["dur"] > 100_000]
    assert (wait["name"], wait["args"]) == ("store: step 3", {"step": 3, "cause": "store"})
    assert len(found["fetches"]) == 12
    assert found["evictions"]


async def test_nothing_is_kept_unless_somebody_traces(nursery, autojump_clock, tmp_path):
    world = world_of(2, MIB)
    slices = await at_work(nursery, Slices(world.store, memory_bytes=8 * MIB))
    with stepfs.trace(tmp_path / "t.json"):
        pass
    handle = slices.open(world.entries[0], SliceIndex(0))
    await read_all(handle)
    assert tracing.ring is None
    assert tracks(json.loads((tmp_path / "t.json").read_text())) == {}


def test_the_clock_and_the_rules_are_those_of_the_profiler(tmp_path):
    theirs, ours = tmp_path / "profiler.json", tmp_path / "both.json"
    profiled = profile(activities=[ProfilerActivity.CPU])
    with profiled, stepfs.trace(tmp_path / "alone.json"), record_function("around"):
        began = time.perf_counter()
        time.monotonic_ns()
        tracing.ring.add("fetches", "GET step 1", time.perf_counter() - began, step=1)  # type: ignore[union-attr]
    profiled.export_chrome_trace(str(theirs))
    alone, profile_file = json.loads((tmp_path / "alone.json").read_text()), json.loads(theirs.read_text())
    check(profile_file)
    (around,) = [event for event in profile_file["traceEvents"] if event["name"] == "around" and event["ph"] == "X"]
    (event,) = tracks(check(alone))["fetches"]
    assert alone["baseTimeNanoseconds"] == profile_file["baseTimeNanoseconds"]
    assert around["ts"] - 1000 <= event["ts"] <= around["ts"] + around["dur"] + 1000
    with stepfs.trace(ours, merge=theirs):
        tracing.ring.add("fetches", "GET step 2", 0.001, step=2)  # type: ignore[union-attr]
    both = check(json.loads(ours.read_text()))
    assert both["traceEvents"][: len(profile_file["traceEvents"])] == profile_file["traceEvents"]
    assert [event["name"] for event in tracks(both)["fetches"]] == ["GET step 2"]
    names = [
        event for event in both["traceEvents"] if event["name"] == "process_name" and event["pid"] == around["pid"]
    ]
    assert len(names) == 1, "the trainer keeps its name"


def test_beyond_the_bound_the_oldest_go_and_the_file_says_so():
    recording = Recording(bytes_max=10_000)
    recording.skip(7, "mount", [])
    recording.add(
        7, "mount", [Event(number, "fetches", "GET", number, 1, {"step": number}) for number in range(1, 101)]
    )
    recording.add(
        7, "mount", [Event(number, "fetches", "GET", number, 1, {"step": number}) for number in range(90, 104)]
    )
    document = check(recording.document())
    steps = [event["args"]["step"] for event in tracks(document)["fetches"]]
    assert steps == list(range(104 - len(steps), 104))
    assert document["stepfs_events_lost"] == 103 - len(steps) > 0
    assert "events lost" in json.dumps(document)


def test_a_daemon_gives_its_last_events_and_ends_when_nobody_asks(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pid, events = tracing.parse(tracing.wanted())
    assert (pid > 0, events) == (True, [])
    assert tracing.ring is not None
    tracing.ring.add("fetches", "GET step 4", 0.5, step=4)
    (event,) = tracing.parse(tracing.wanted())[1]
    assert (event.name, event.ns_long, event.facts) == ("GET step 4", 500_000_000, {"step": 4})
    now[0] += 9
    tracing.look()
    assert tracing.ring is not None
    now[0] += 2
    tracing.look()
    assert tracing.ring is None


def test_what_cannot_be_written_or_merged(tmp_path, monkeypatch):
    with pytest.raises(AbsentError, match="does not exist"), stepfs.trace(tmp_path / "no/t.json"):
        raise AssertionError
    with pytest.raises(RefusedError, match="cannot be written"), stepfs.trace(tmp_path):
        raise AssertionError
    with (
        stepfs.trace(tmp_path / "a.json"),
        pytest.raises(RefusedError, match="traced already"),
        stepfs.trace(tmp_path / "b.json"),
    ):
        raise AssertionError
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UsageError, match="has no traceEvents"):
        tracing.read_profile(tmp_path / "x.json")
    with pytest.raises(UsageError, match="cannot be read as a trace"):
        tracing.read_profile(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(tmp_path.iterdir())
    monkeypatch.setattr("gzip.compress", full)
    with pytest.raises(StepfsError, match="No space left on device; nothing is under that name"):
        tracing.write(tmp_path / "t.json.gz", {})
    assert set(tmp_path.iterdir()) == before
