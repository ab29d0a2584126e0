"""Which records of a group count at some grace, and what a reclaimer makes of them."""

from __future__ import annotations

import pytest
from doubles.faulty_store import FaultyStore
from stepfs.lake.floor import Floor
from stepfs.lake.group_records import Counting, counting, superseded

from stepfs.errors import RefusedError
from stepfs.format.ids import Step, Version
from stepfs.format.records import ConsumerRecord, FloorRecord, LakeIdentity, decode_floor, encode_floor
from stepfs.lake.reclaim.plan import GroupEvidence, Need, holds_back, least_need
from stepfs.store.api import Entry

LAKE = LakeIdentity("a" * 32, 2, ".pt", 0)


def slots(**ages: float) -> tuple[tuple[int, Entry], ...]:
    return tuple((int(name[1:]), Entry(name, 1, age)) for name, age in ages.items())


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (slots(n0=500), Counting((), began=False, unknown=False)),
        (slots(n0=5), Counting((), began=True, unknown=False)),
        (slots(n0=500, n1=5), Counting((0,), began=False, unknown=False)),
        (slots(n0=500, n1=100), Counting((), began=False, unknown=False)),
        (slots(n7=500), Counting((), began=False, unknown=False)),
        (slots(n7=5), Counting((), began=False, unknown=True)),
        (slots(n7=500, n8=300, n9=50, n10=5), Counting((8, 9), began=False, unknown=False)),
        (slots(n7=500, n9=50), Counting((), began=False, unknown=True)),
        (slots(n2=1, n9=500), Counting((), began=False, unknown=True)),  # a sleeper took slot 2 again
        (slots(n0=20, n1=10, n2=5), Counting((0, 1), began=True, unknown=False)),
    ],
)
def test_a_record_counts_until_its_successor_is_as_old_as_the_grace(
    listed: tuple[tuple[int, Entry], ...], expected: Counting
) -> None:
    assert counting(listed, 100.0) == expected


def test_without_grace_the_newest_record_alone_counts() -> None:
    assert counting(slots(n3=0, n4=0), 0.0) == Counting((), began=False, unknown=False)


def test_what_counts_no_more_may_be_trimmed_and_nothing_else() -> None:
    assert superseded(slots(n6=900, n7=500, n8=300, n9=50, n10=5), 100.0) == ["n6", "n7"]
    assert superseded(slots(n6=900, n7=500), 0.0) == ["n6"]
    assert superseded(slots(n7=5), 100.0) == []
    assert superseded((), 100.0) == []


def record(need: int, *, retired: bool = False, group: str = "run") -> ConsumerRecord:
    return ConsumerRecord(bytes(16), group, (Step(need),), Step(0), retired, 0)


def group(
    newest: ConsumerRecord | None, *earlier: ConsumerRecord, began: bool = False, unknown: bool = False
) -> GroupEvidence:
    return GroupEvidence("d", 9, newest, earlier, began=began, unknown=unknown, settled=not earlier)


def need(*groups: GroupEvidence, first_live: int = 3, next_step: int = 100) -> Need:
    floor = Floor(FaultyStore(), LAKE, 0, FloorRecord(b"", Version(0), Step(first_live), Step(0), 0, 0))
    return least_need(groups, floor, Step(next_step), grace_s=3600.0)


def test_the_least_of_what_is_needed_and_was_needed_within_grace_decides() -> None:
    assert need(group(record(20)), group(record(30))).step == 20
    assert need(group(record(40), record(10), record(20))).step == 10
    assert need(group(record(40), record(1))).step == 3, "what is gone cannot be had"
    assert "less than 1 h ago" in need(group(record(40), record(10))).reason


def test_a_group_that_retired_within_grace_counts_by_what_it_needed() -> None:
    gone = group(record(10, retired=True), record(10))
    assert need(group(record(40)), gone).step == 10
    assert need(group(record(40)), group(None)).step == 40


def test_a_record_that_is_missing_holds_everything() -> None:
    found = need(group(record(40)), group(record(90, group="odd"), unknown=True))
    assert found.step is None
    assert "'odd'" in found.reason


def test_a_lake_whose_only_groups_are_new_or_were_retired_within_grace_keeps_everything() -> None:
    assert need(group(record(40), began=True)).step is None
    assert need(group(record(40), record(10, retired=True))).step is None
    assert need(group(record(40), began=True), group(record(50))).step == 40, "another group was there"
    assert need().step is None
    assert need(group(record(40, retired=True))).step is None


def test_a_need_of_what_is_gone_holds_every_live_step_and_is_explained() -> None:
    found = need(group(record(2)), group(record(50)))
    assert found.step == 3
    assert "needs step 2, but steps below 3 were reclaimed" in found.reason
    assert "--retire" in found.reason


def test_a_need_of_what_nobody_committed_is_refused() -> None:
    with pytest.raises(RefusedError, match="another lake"):
        need(group(record(101)))


def test_the_second_look_holds_back_for_every_doubt() -> None:
    assert not holds_back([group(record(20))], Step(20))
    assert holds_back([group(record(19))], Step(20))
    assert holds_back([group(record(40), record(19))], Step(20))
    assert holds_back([group(record(40), unknown=True)], Step(20))
    assert holds_back([group(record(40), began=True)], Step(20))
    assert holds_back([], Step(20)), "the last group retired meanwhile"


def test_floor_records_say_more_only_where_there_is_more_to_say() -> None:
    plain = FloorRecord(bytes(16), Version(3), Step(4), Step(5), 6, 7)
    full = FloorRecord(
        *(bytes(16), Version(3), Step(4), Step(5), 6, 7),
        grace_ms=0,
        swept_epochs=8,
        swept_ms=9,
        tombstones={"0f" * 16: 10, "a0" * 16: 2**53},
    )
    pointing = FloorRecord(bytes(16), Version(3), Step(4), Step(5), 6, 7, tombstones_at=11)
    for one in (plain, full, pointing):
        assert decode_floor(encode_floor(LAKE.lake_id, one), "x") == (LAKE.lake_id, one)
    for word in (b"grace", b"swept", b"tombstones"):
        assert word not in encode_floor(LAKE.lake_id, plain)
