"""Every sequence of requests keeps what the groups need, and the minima of the need are those of all records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError, WithdrawnError
from stepfs.format.control import (
    KEPT_CHECKPOINTS_MAX,
    MINIMA_MAX,
    NOTHING_YET,
    ControlRecord,
    GroupRecord,
    decode_control,
    encode_control,
)
from stepfs.format.ids import Step, Version
from stepfs.lake import decisions
from stepfs.lake.decisions import (
    Add,
    Advance,
    Drop,
    Register,
    Request,
    Resume,
    Retire,
    Revise,
    decide,
    least_need,
    successor,
)

LAKE = "0" * 32
FORK = "file:///child"
names = st.sampled_from(["a", "b"])
steps = st.integers(0, 8).map(Step)
sets = st.frozensets(steps, max_size=4)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(Register, names, st.sampled_from(["", FORK])),
    st.builds(Add, names, steps, st.sampled_from([None, 1, 2])),
    st.builds(Resume, names, steps),
    st.builds(Drop, names, steps),
    st.builds(lambda name, kept, revives: Revise(name, lambda _: kept, revives), names, sets, st.booleans()),
    st.builds(Retire, names),
    st.builds(lambda first_live: Advance(first_live, Version(first_live), 1), steps),
)
histories = st.lists(requests, min_size=1, max_size=60)


def records_of(history: list[Request]) -> list[ControlRecord]:
    """The records that these requests make, one after another; an advance is decided on the newest."""
    records: list[ControlRecord] = []
    for request in history:
        number, record = len(records) - 1, records[-1] if records else NOTHING_YET
        try:
            following = decide(number, record, request)
        except StepfsError:
            continue
        if following is not None:
            records.append(replace(following, record_id=bytes(16)))
    return records


@given(histories)
def test_no_sequence_of_requests_gives_up_what_a_group_needs(history):
    before = NOTHING_YET
    for record in records_of(history):
        assert all(group.need >= record.first_live_step for group in record.groups.values())
        assert record.first_live_step >= before.first_live_step
        if record.first_live_step > before.first_live_step:
            assert before.groups == record.groups
            assert record.first_live_step <= min(group.need for group in before.groups.values())
        before = record


@given(histories)
def test_a_record_reads_back(history):
    for record in records_of(history):
        assert decode_control(encode_control(LAKE, record), "x") == (LAKE, record)


@given(histories, steps, st.data())
def test_the_minima_are_those_of_all_records_within_the_grace(history, grace, data):
    """`ages` of all records, the newest first, rise; a record was the newest until the next one came."""
    records = records_of(history)
    pauses = data.draw(st.lists(st.integers(0, 4), min_size=len(records), max_size=len(records)))
    ages = {number: float(sum(pauses[number:])) for number in range(len(records))}
    if not records:
        return
    newest = records[-1]
    counts = [record for number, record in enumerate(records) if number + 1 == len(records) or ages[number + 1] < grace]
    # Before record 0 every step was needed.
    needs = [record.need for record in counts] + ([Step(0)] if ages[0] < grace else [])
    assert least_need(newest, ages, grace) == max(min(needs), newest.first_live_step)


@given(histories, requests)
def test_what_says_so_already_says_so_again(history, request_):
    """A caller that lost the slot to its own bytes decides again on them: nothing is left to do."""
    records = records_of([*history, Register("a")])
    if isinstance(request_, Drop | Retire | Advance):
        return
    number = len(records) - 1
    try:
        following = decide(number, records[-1], request_)
    except StepfsError:
        return
    assert following is None or decide(number + 1, following, request_) is None


def test_minima_that_pile_up_are_merged_so_that_none_counts_shorter():
    record, ended = NOTHING_YET, {}
    for number in range(2 * MINIMA_MAX):
        record = successor(number - 1, record, groups={"a": GroupRecord(start=Step(number))})
        ended[number] = 0.0
    assert len(record.minima) == MINIMA_MAX
    assert decode_control(encode_control(LAKE, replace(record, record_id=bytes(16))), "x")[1].minima == record.minima
    assert least_need(record, {}, 1.0) == 0
    for young in (2 * MINIMA_MAX - 5, 5):
        ages = {number: 0.0 if number >= young else 9.0 for number in ended}
        assert least_need(record, ages, 1.0) <= young - 1


def test_minima_that_an_advance_passes_become_one():
    record, wants = NOTHING_YET, [Add("a", Step(0)), Add("a", Step(2), 1), Add("a", Step(5), 1)]
    for number, request in enumerate([*wants, Advance(Step(3), Version(0), 0)], start=-1):
        following = decide(number, record, request)
        assert following is not None
        record = following
    assert record.minima == ((2, 3), (4, 5))


def test_a_group_that_keeps_nothing_any_more_needs_what_it_did():
    record = successor(0, NOTHING_YET, groups={"a": GroupRecord(Step(0), (Step(5), Step(7)))})
    for request in (Drop("a", Step(5)), Drop("a", Step(7))):
        after = decide(1, record, request)
        assert after is not None
        record = after
    assert record.groups["a"] == GroupRecord(Step(7))


@pytest.mark.parametrize(
    ("request_", "refusal"), [
        (Add("a", Step(4)), WithdrawnError),
        (Add("new", Step(4), 1), WithdrawnError), (Resume("a", Step(4)), WithdrawnError),
        (Revise("a", lambda kept: kept | {Step(4)}), WithdrawnError), (Drop("a", Step(6)), AbsentError),
        (Drop("new", Step(5)), AbsentError),
        (Retire("new"), AbsentError),
        (Revise("a", lambda _: frozenset(Step(5 + number) for number in range(KEPT_CHECKPOINTS_MAX + 1))),
         UsageError),
    ],
)  # fmt: skip
def test_refusals(request_, refusal):
    record = successor(6, NOTHING_YET, first_live_step=Step(5), groups={"a": GroupRecord(Step(0), (Step(5), Step(7)))})
    with pytest.raises(refusal):
        decide(7, record, request_)


def test_a_new_group_needs_every_live_step_and_no_other():
    record = successor(6, NOTHING_YET, first_live_step=Step(5))
    for request in (Register("a"), Add("a", Step(7)), Revise("a", lambda _: frozenset({Step(7)}))):
        after = decide(7, record, request)
        assert after is not None
        assert after.groups["a"].start == 5


def test_an_advance_gives_up_what_no_group_of_the_record_needs():
    record = successor(6, NOTHING_YET, groups={"a": GroupRecord(Step(5))})
    assert decide(7, record, Advance(Step(6), Version(2), 10)) is None
    assert decide(7, record, Advance(Step(0), Version(2), 10)) is None
    assert decide(7, record, Advance(Step(5), Version(2), 10, grace_s=1.0)) is None, "it was less a moment ago"
    assert decide(7, record, Advance(Step(5), Version(2), 10, {7: 2.0}, 1.0)) is not None
    after = decide(7, record, Advance(Step(5), Version(2), 10))
    assert after is not None
    assert (after.first_live_step, after.floor, after.deleted_bytes) == (5, 2, 10)


def test_a_record_in_which_a_group_needs_what_is_given_up_is_never_written():
    record = replace(NOTHING_YET, record_id=bytes(16), first_live_step=Step(3))
    assert encode_control(LAKE, replace(record, groups={"a": GroupRecord(Step(3))}))
    with pytest.raises(RefusedError, match="needs step 2, below 3"):
        encode_control(LAKE, replace(record, groups={"a": GroupRecord(Step(2))}))


def test_which_requests_fence():
    """What a trainer relies on when it returns takes a slot; what gives something up need not."""
    fencing = {name for name, request in vars(decisions).items() if getattr(request, "fences", False) is True}
    assert fencing == {"Add", "Register", "Resume"}
