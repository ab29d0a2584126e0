"""Every sequence of requests keeps what the groups need, and the minima of the need are those of all records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import AbsentError, CorruptError, RefusedError, StepfsError, UsageError, WithdrawnError
from stepfs.format.codec import Kind, decode, encode
from stepfs.format.control import (
    KEPT_CHECKPOINTS_MAX,
    MINIMA_MAX,
    NOTHING_YET,
    ControlRecord,
    GroupRecord,
    decode_control,
    encode_control,
)
from stepfs.format.identity import PACE_GROUP
from stepfs.format.ids import Step, Version
from stepfs.lake import decisions
from stepfs.lake.decisions import (
    Add,
    Advance,
    Drop,
    Pace,
    Register,
    Request,
    Resume,
    Retire,
    Revise,
    add_to_order,
    decide,
    least_need,
    resume_order,
    set_order,
    successor,
)
from stepfs.lake.reclaim.run import Need, reclaim_bound

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
    st.builds(lambda name, step: Pace(PACE_GROUP + name, step), names, steps),
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
        assert all(group.need >= record.first_live_step for group in record.holding.values())
        assert record.first_live_step >= before.first_live_step
        if record.first_live_step > before.first_live_step:
            assert before.groups == record.groups
            assert record.first_live_step <= before.need
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


GRACE_S = 3600.0
EMPTY = ControlRecord(b"i" * 16, 1)


def record(*minima: tuple[int, int], first_live: int = 3) -> ControlRecord:
    """With one group, whose need is the last of the minima."""
    need = Step(minima[-1][1])
    return replace(
        EMPTY,
        first_live_step=Step(first_live),
        groups={"run": GroupRecord(Step(0), (need,))},
        minima=tuple((number, Step(step)) for number, step in minima),
    )


@pytest.mark.parametrize(
    ("minima", "ages_s", "expected"),
    [
        ([(5, 20)], {}, 20),
        ([(4, 10), (5, 20)], {4: 3599.0}, 10),
        ([(4, 10), (5, 20)], {4: 3600.0}, 20),
        ([(4, 10), (5, 20)], {}, 10),  # a LIST that does not show it yet
        ([(2, 5), (3, 10), (4, 15), (5, 20)], {2: 9000.0, 3: 5000.0, 4: 10.0}, 15),
        ([(2, 5), (3, 10), (4, 15), (5, 20)], {2: 10.0, 3: 5000.0, 4: 5000.0}, 5),  # by a store whose ages are wrong
    ],
)
def test_a_need_counts_until_the_record_that_ended_it_is_as_old_as_the_grace(minima, ages_s, expected):
    assert least_need(record(*minima), ages_s, GRACE_S) == expected


def test_without_grace_the_newest_record_alone_counts() -> None:
    assert least_need(record((4, 10), (5, 20)), {4: 0.0}, 0.0) == 20


def said(*kept: int) -> ControlRecord:
    """After a group has kept these checkpoints, one after another."""
    now = EMPTY
    for number, step in enumerate(kept):
        after = decide(number - 1, now, Revise("run", lambda _, step=step: frozenset({Step(step)})))  # type: ignore[misc]
        assert after is not None
        now = after
    return now


@pytest.mark.parametrize(
    ("kept", "minima"),
    [
        ((10,), [(0, 0), (1, 10)]),
        ((10, 20, 30), [(0, 0), (1, 10), (2, 20), (3, 30)]),
        ((10, 30, 20), [(0, 0), (1, 10), (3, 20)]),  # 30 held nothing back that 20 does not
        ((10, 30, 5), [(0, 0), (3, 5)]),
        ((10, 30, 10, 30), [(0, 0), (3, 10), (4, 30)]),  # 10 ended last in record 3
    ],
)
def test_a_record_carries_the_rising_minima_of_the_past(kept, minima):
    assert list(said(*kept).minima) == minima


def test_a_retired_group_counts_by_what_it_needed_and_a_new_one_from_its_first_second_as_if_it_needed_all():
    two = decide(1, said(10, 20), Add("other", Step(40)))
    assert two is not None
    alone = decide(2, two, Retire("run"))
    assert alone is not None
    assert list(alone.minima)[-2:] == [(3, 20), (4, 40)]
    assert least_need(alone, {0: 9000.0, 1: 9000.0, 3: 5.0}, GRACE_S) == 20
    assert least_need(said(40), {0: 5.0}, GRACE_S) == 0


def test_minima_of_steps_that_are_given_up_leave_the_record() -> None:
    after = successor(2, said(10, 20, 30), first_live_step=Step(25))
    assert list(after.minima) == [(2, 25), (4, 30)]


def test_without_a_reclaimer_the_minima_stay_bounded_and_hold_back_too_much_rather_than_too_little() -> None:
    steps = range(1, 3 * MINIMA_MAX)
    now = said(*steps)
    assert len(now.minima) == MINIMA_MAX
    numbers = [number for number, _ in now.minima]
    for age_from in (1, len(steps) // 2, len(steps) - 2):
        ages_s = {number: 0.0 if number >= age_from else 2 * GRACE_S for number in numbers}
        exact = ([0, *steps])[age_from]
        assert least_need(now, ages_s, GRACE_S) <= exact


def need(now: ControlRecord, next_step: int = 100, age_s: float = 7.0) -> Need:
    return reclaim_bound(now, {number: age_s for number, _ in now.minima[:-1]}, GRACE_S, Step(next_step))


def test_what_holds_steps_back_is_named() -> None:
    assert need(record((5, 20))) == Need(Step(20), "group 'run' needs step 20")
    assert need(record((4, 10), (5, 20))) == Need(Step(10), "step 10 was needed less than 1 h ago")
    timeless = need(record((4, 10), (5, 20)), age_s=0.0)
    assert timeless.step == 10
    assert "sends no Date" in timeless.reason
    assert "--grace 0" in timeless.reason
    found = need(EMPTY)
    assert found.step is None
    assert "no group is registered" in found.reason


def test_a_need_of_what_nobody_committed_is_refused() -> None:
    with pytest.raises(RefusedError, match="another lake"):
        need(record((5, 101)))


live_steps = st.integers(0, 30).map(Step)
orders = st.lists(live_steps, unique=True, max_size=8).map(tuple)
records = st.builds(
    lambda order: replace(
        decide(-1, EMPTY, Revise("run", lambda _: frozenset(order))).groups["run"],
        recorded=() if sorted(order) == list(order) else order,
    ),
    orders,
)


@given(orders, live_steps, st.integers(1, 4))
def test_keep_never_loses_what_was_just_recorded_nor_what_is_greater(order, step, keep):
    after = add_to_order(order, step, keep)
    assert after[-1] == step
    assert {kept for kept in order if kept > step} <= set(after)
    at_or_below = [kept for kept in after if kept <= step]
    older = [kept for kept in order if kept < step]
    assert at_or_below == [*older, step][-keep:]


@given(orders, live_steps)
def test_resuming_drops_nothing_and_ranks_what_is_greater_as_oldest(order, step):
    after = resume_order(order, step)
    assert set(after) == {*order, step}
    greater = [kept for kept in order if kept > step]
    assert after[: len(greater)] == tuple(greater)
    assert after[-1] == step
    assert resume_order(after, step) == after


@given(orders, st.frozensets(live_steps, max_size=8))
def test_a_set_keeps_the_order_of_what_was_there(order, kept):
    after = set_order(order, kept)
    assert set(after) == kept
    assert [step for step in after if step in order] == [step for step in order if step in kept]


@given(records)
def test_a_groups_record_reads_back(record):
    groups = {"run": record}
    body = encode_control(LAKE, replace(EMPTY, groups=groups))
    assert decode_control(body, "x")[1].groups == groups
    (group,) = decode(Kind.CONTROL, body, "x").maps("groups")
    assert group.integers("kept") == sorted(record.order)
    assert ("recorded" in group) == (list(record.order) != sorted(record.order))


@pytest.mark.parametrize(
    "says", [
        {"recorded": [2, 1, 3]}, {"recorded": [2, 2]}, {"recorded": [1, 2]}, {"recorded": "2,1"},
        {"kept": [2, 1]}, {"kept": [0, 1, 2]}, {"kept": [1, 1]}, {"kept": [], "start": 0},
        {"fork": 7}, {"fork": "x" * 3000}, {"name": ""}, {"name": "a\x1b[2J"},
        {"name": 7},
    ],
)  # fmt: skip
def test_groups_that_contradict_the_record_are_corrupt(says):
    """The first live step is 1."""
    group = {"name": "run", "start": 1, "kept": [1, 2]}
    body = decode(Kind.CONTROL, encode_control(LAKE, replace(EMPTY, first_live_step=Step(1))), "x")._map
    assert decode_control(encode(Kind.CONTROL, {**body, "groups": [group]}), "x")
    with pytest.raises(CorruptError):
        decode_control(encode(Kind.CONTROL, {**body, "groups": [{**group, **says}]}), "x")


@pytest.mark.parametrize("minima", [[1], [1, 5, 1, 6], [2, 5, 3, 5], [2, 5, 1, 6], [1, 2] * 300])
def test_minima_that_do_not_rise_are_corrupt(minima):
    body = decode(Kind.CONTROL, encode_control(LAKE, EMPTY), "x")._map
    with pytest.raises(CorruptError):
        decode_control(encode(Kind.CONTROL, {**body, "minima": minima}), "x")
