"""What a daemon leaves to the next one: whole, of any version, however it died, and at what cost."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.checkpoints.formats import NextStep, Place
from stepfs.checkpoints.watch import Watch, WatchState
from stepfs.data.access_pattern import STATE_FILES_MAX
from stepfs.data.announced_orders import (
    HintedStreams,
    NoHint,
    OrderState,
    ShuffledOrder,
    parse_hint,
    shuffle_name,
    steps_names,
)
from stepfs.data.page_cache import PageOrder, Primer
from stepfs.data.prefetch import Prefetcher, ReadersState
from stepfs.data.slices import Slices
from stepfs.follow.parts import GroupState
from stepfs.format.ids import SliceIndex, Step
from stepfs.mount import state as state_module
from stepfs.mount.daemon.parts import OpenedState, OpenState, ViewState
from stepfs.mount.state import OWNER_BYTES, State, taken

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PARTS = (WatchState, OrderState, ReadersState, GroupState, OpenedState, OpenState, ViewState)
NAMES = st.sampled_from(["a", "b", "order/0", "order/0/4"])
CHANGES = st.lists(
    st.dictionaries(NAMES, st.none() | st.integers(0, 9) | st.text(max_size=200), max_size=3), max_size=12
)


@contextmanager
def fresh(growth_bytes=None):
    with pytest.MonkeyPatch.context() as patch:
        if growth_bytes is not None:  # and slots that a test can copy
            patch.setattr(state_module, "_GROWTH_BYTES", growth_bytes)
            patch.setattr(state_module, "_SLOT_BYTES", dict.fromkeys(state_module._SLOT_BYTES, 128 << 10))
        state = State.fresh()
        try:
            yield state
        finally:
            os.close(state.descriptor)


def parts_of(found, prefix="order/"):
    return {name.removeprefix(prefix): taken(OrderState, value) for name, value in found.items()}


@given(CHANGES, st.sampled_from([0, 100, 1 << 16]))
def test_the_next_daemon_reads_all_that_was_decided(changes, growth):
    with fresh(growth) as state:
        expected = {}
        for change in changes:
            state.decide(change)
            expected |= change
            assert State(state.descriptor).read() == {name: one for name, one in expected.items() if one is not None}


@given(CHANGES.filter(any), st.sampled_from([0, 100, 1 << 16]), st.data())
def test_a_write_that_a_kill_cut_off_leaves_what_was_before_it(changes, growth, data):
    with fresh(growth) as state:
        written = []
        with pytest.MonkeyPatch.context() as patch:
            pwrite = os.pwrite
            patch.setattr(os, "pwrite", lambda *what: written.append(what) or pwrite(*what))
            for change in changes[:-1]:
                state.decide(change)
            before = State(state.descriptor).read()
            kept = os.pread(state.descriptor, os.fstat(state.descriptor).st_size, 0)
            written.clear()
            state.decide(changes[-1])
        after = State(state.descriptor).read()
        os.ftruncate(state.descriptor, 0)
        pwrite(state.descriptor, kept, 0)
        for descriptor, body, offset in written:
            pwrite(descriptor, body[: data.draw(st.integers(0, len(body)))], offset)
        found = State(state.descriptor).read()
        assert found in (before, after)
        following = State(state.descriptor)
        following.adopt(found)
        following.begin()
        following.decide({"next": 1})
        assert State(state.descriptor).read() == {**found, "next": 1}


@given(
    st.lists(
        st.tuples(
            st.sampled_from([OWNER_BYTES, OWNER_BYTES + (64 << 20), OWNER_BYTES + (128 << 20)]), st.binary(max_size=64)
        )
    )
)
def test_no_bytes_make_the_next_daemon_fail(pieces):
    with fresh() as state:
        for offset, body in pieces:
            os.pwrite(state.descriptor, body, offset)
        found = State(state.descriptor)
        assert found.read() == found.read_noted() == found.read_open() == {}
        assert [*found.primed.read()] == []


@pytest.mark.parametrize("cls", PARTS)
@given(data=st.data())
def test_values_of_another_version_take_the_default(cls, data):
    known = dict.fromkeys(cls.__dataclass_fields__, JSON)
    body = data.draw(JSON | st.fixed_dictionaries({}, optional={**known, "of a later version": JSON}))
    found = taken(cls, json.loads(json.dumps(body)))
    again = taken(cls, json.loads(json.dumps({name: getattr(found, name) for name in known})))
    assert again == found
    assert taken(cls, {}) == taken(cls, {"of a later version": 1}) == cls()


WORDS = st.sampled_from(["", "1-none", "1-shuffle-1-2-0-9-0-1-0", "1-shuffle-1-2-9-0-0-1-0", "1-steps-0-AA", "x"])
ORDER = st.builds(
    OrderState,
    WORDS,
    st.integers(0, 1 << 63),
    st.integers(0, 1 << 63),
    st.lists(st.integers(0, (1 << 63) - 1), max_size=4),
)
ROWS = st.lists(st.lists(st.integers(0, (1 << 63) - 1), max_size=4), max_size=4)


@given(
    orders=st.dictionaries(st.sampled_from(["0", "0/0", "0/1", "7", "7/0", "x", "1/2/3"]), ORDER),
    readers=st.builds(
        ReadersState, st.lists(st.floats(0, 1e18), max_size=4), ROWS, st.lists(st.booleans()),
        st.lists(st.integers(0, (1 << 63) - 1), max_size=4), st.dictionaries(st.sampled_from(["0", "7", "x"]), ROWS),
    ),
    watch=st.builds(WatchState, seen=st.none() | st.lists(st.integers(0, 99)), out_of_order=st.dictionaries(st.text(), st.text())),
)  # fmt: skip
async def test_whatever_is_taken_has_a_meaning_or_none(orders, readers, watch):
    prefetcher = Prefetcher(Slices(None, memory_bytes=1 << 20), None, None)  # type: ignore[arg-type]
    decided = {}
    prefetcher.hints.decide = decided.update
    prefetcher.inherit(readers, orders)
    prefetcher.state()
    prefetcher.hints.note_open(Step(3), SliceIndex(0), 0.0)
    prefetcher.position.runs()
    prefetcher._pace.steps_per_s()
    assert len(prefetcher.hints.describe()) == sum(1 for name, one in decided.items() if "/" not in name and one)
    Watch(None, Place.parse("/unused"), NextStep("N")).inherit(watch)  # type: ignore[arg-type]


def test_of_two_daemons_the_one_that_writes_counts():
    with fresh() as old:
        old.decide({"a": 1})
        old.close({"open": 1})
        old.decide({"a": 2})  # too late for the next one
        new = State(old.descriptor)
        assert (new.read(), new.read_open()) == ({"a": 1}, {"open": 1})
        new.adopt(new.read())
        new.decide({"b": 1})
        assert State(old.descriptor).read() == {"a": 1}
        new.begin()
        assert (State(old.descriptor).read(), State(old.descriptor).read_open()) == ({"a": 1, "b": 1}, {})
        for _ in range(2):
            old.begin()  # the new one has ended before it served
            assert (State(old.descriptor).read(), State(old.descriptor).read_open()) == ({"a": 2}, {})
            old.decide({"c": 1})
            old.decide({"c": None})


def test_what_is_not_known_is_told_once(caplog):
    caplog.set_level("INFO", "stepfs")
    for _ in range(2):
        assert taken(GroupState, {"name": "run", "of 2031": 1}) == GroupState("run")
    assert [record.message for record in caplog.records] == [
        "GroupState.of 2031 of the daemon before is not known to this version"
    ]


def test_the_owner_has_the_first_bytes_of_the_file():
    with fresh() as state:
        os.pwrite(state.descriptor, b"x" * OWNER_BYTES, 0)
        state.decide({"a": 1})
        assert os.pread(state.descriptor, OWNER_BYTES, 0) == b"x" * OWNER_BYTES
        assert State(state.descriptor).read() == {"a": 1}


@pytest.mark.logs("cannot be written: No space left on device")
def test_a_state_that_cannot_be_written_keeps_no_mount_from_serving(monkeypatch, caplog):
    with fresh() as state:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        for number in range(3):
            state.decide({"a": number})
            state.primed.enter((Step(number), SliceIndex(0)), 1)
        monkeypatch.undo()
        assert len(caplog.records) == 1


def test_a_change_of_what_is_primed_writes_one_record_however_much_is_primed():
    files = 262_144
    with fresh() as state:
        table = state.primed
        places = [table.enter((Step(number // 8), SliceIndex(number % 8)), 100) for number in range(files)]
        order = PageOrder(lambda key, unneeded: table.mark(places[key[0] * 8 + key[1]], unneeded=unneeded))
        assert table.written == files
        key = (Step(7), SliceIndex(3))
        for act, records in ((order.consume, 1), (order.consume, 0), (order.make_idle, 0), (order.discard, 0)):
            before = table.written
            act(key)
            assert table.written - before == records
        table.leave(places[0])
        assert table.enter((Step(1 << 40), SliceIndex(1)), 1 << 40) == places[0]
        assert table.written == files + 3
        found = {key: (length, unneeded) for _, key, length, unneeded in State(state.descriptor).primed.read()}
        assert len(found) == files
        assert found[Step(1 << 40), SliceIndex(1)] == (1 << 40, False)
        assert found[key] == (100, True)


@pytest.mark.parametrize("kept", [10 << 20, 150])
async def test_what_is_primed_is_handed_on_as_far_as_there_is_room(kept):
    slices = Slices(None, memory_bytes=kept)  # type: ignore[arg-type]
    state = State.fresh()
    primer = Primer(slices, None, state.primed)  # type: ignore[arg-type]
    former = [(0, (Step(0), SliceIndex(0)), 100, True), (1, (Step(1), SliceIndex(0)), 100, False)]
    state.primed.write(former)
    primer.inherit()
    assert [*state.primed.read()] == former[: 2 if kept > 150 else 1]
    assert slices.cache.pool.used == primer.bytes == 100 * len(primer.primed)
    os.close(state.descriptor)


async def test_what_is_noted_of_readers_has_a_bound(autojump_clock):
    prefetcher = Prefetcher(Slices(None, memory_bytes=1 << 20), None, None)  # type: ignore[arg-type]
    prefetcher.hints.accept(parse_hint(shuffle_name(ORDER_OF_1000, 0)), 0.0)
    for place in range(10):
        for index in range(450):
            prefetcher.hints.note_open(ORDER_OF_1000.step_at(place), SliceIndex(index), 0.0)
            prefetcher.position.note(Step(place), SliceIndex(index))
    noted = prefetcher.state()
    for rows in (noted.opened, *noted.near.values()):
        assert sum(len(row) - 1 for row in rows) == STATE_FILES_MAX
    assert noted.opened[-1][0] == 9


ORDER_OF_1000 = ShuffledOrder(7, 1, Step(0), Step(1000))


def on_record():
    hints, record = HintedStreams(), {}

    def decide(changes):
        writes.append(changes)
        record.update(changes)
        for name in [name for name, value in record.items() if value is None]:
            del record[name]

    writes: list[object] = []
    hints.decide = decide
    return hints, record, writes


def followed(record, near, now=2.0):
    new, again, _ = on_record()
    new.inherit(parts_of(json.loads(json.dumps(record))), json.loads(json.dumps(near)), now)
    assert {name.partition("/")[0] for name in again} == {name.partition("/")[0] for name in record}
    return new


def test_announced_orders_are_handed_on_with_the_places_of_their_readers():
    old, record, _ = on_record()
    for name in (shuffle_name(ORDER_OF_1000, 0), *steps_names(map(Step, range(5, 900, 3)))):
        old.accept(parse_hint(name), 0.0)
    for place in range(40):
        old.note_open(ORDER_OF_1000.step_at(place), SliceIndex(0), 1.0)
    old.settle()
    new = followed(record, old.near())
    assert new.describe() == old.describe()
    view = {"hinted": frozenset(), "window_of": lambda _: 9, "first": Step(0), "frontier": Step(999), "now": 2.0}
    assert new.plan(**view) == old.plan(**view) != []
    assert new.needed_from() == old.needed_from() == 0


@pytest.mark.parametrize("when", ["announced", "begun", "ended", "withdrawn"])
def test_a_kill_loses_nothing_that_was_decided_about_an_order(when):
    """All that a second ago was noted is nothing at all: the kill came at once."""
    old, record, _ = on_record()
    old.accept(parse_hint(shuffle_name(ORDER_OF_1000, 0)), 0.0)
    opened = {"announced": 0, "begun": 700, "ended": 1000, "withdrawn": 5}[when]
    for place in range(opened):
        old.note_open(ORDER_OF_1000.step_at(place), SliceIndex(0), 1.0)
    if when == "withdrawn":
        old.accept(NoHint(), 1.0)
    new = followed(record, {})
    assert new.needed_from() == old.needed_from() == (None if when in {"ended", "withdrawn"} else 0)
    for place in range(opened, 1000):  # its readers are found again, and it ends
        assert (new.note_open(ORDER_OF_1000.step_at(place), SliceIndex(0), 3.0) is None) == (
            when in {"ended", "withdrawn"}
        )
    assert new.needed_from() is None


def test_an_epoch_that_is_nearly_read_is_not_forgotten_when_the_next_one_has_begun():
    old, record, _ = on_record()
    first, second = (ShuffledOrder(7, epoch, Step(0), Step(200)) for epoch in (0, 1))
    old.accept(parse_hint(shuffle_name(first, 0)), 0.0)
    for place in range(199):
        old.note_open(first.step_at(place), SliceIndex(0), 1.0)
    old.accept(parse_hint(shuffle_name(second, 0)), 1.0)
    assert len(old.describe()) == 2
    new = followed(followed_record := json.loads(json.dumps(record)), {})
    assert followed_record
    assert [one["steps"] for one in new.describe()] == [200, 200]
    new.note_open(first.step_at(199), SliceIndex(0), 3.0)
    assert new.describe()[0]["at"] == 200


def test_a_list_is_on_record_name_by_name_and_leaves_nothing_behind():
    old, record, writes = on_record()
    steps = [Step(step * 7919 % 100_003) for step in range(20_000)]
    names = [*steps_names(steps)]
    for name in names:
        old.accept(parse_hint(name), 0.0)
        assert sum(len(value.get("steps", [])) for value in writes[-1].values()) < 200
    assert len(writes) == len(names)
    assert followed(record, {}).describe() == old.describe()
    missing = {name: value for name, value in record.items() if name != [*record][-1]}
    assert followed_or_none(missing).describe()[0]["steps"] < 20_000
    old.accept(NoHint(), 0.0)
    assert record == {}


def followed_or_none(record):
    new = HintedStreams()
    new.inherit(parts_of(record), {}, 2.0)
    return new


def test_opens_of_an_order_are_written_each_so_many_places():
    old, record, writes = on_record()
    old.accept(parse_hint(shuffle_name(ORDER_OF_1000, 0)), 0.0)
    for place in range(1000):
        for index in range(8):
            old.note_open(ORDER_OF_1000.step_at(place), SliceIndex(index), 1.0)
            front = record["0"]["front"]
            assert place + 1 - front < 32
    assert len(writes) <= 1 + 1000 // 32 + 1
