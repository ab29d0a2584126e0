"""What `stepfs status` says of a plan, from the stored position alone: by the reading side, for what the writing side wrote."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest

from stepfs.cli.commands.status import plan_lines
from stepfs.format.planned import PlanStanding, read_plan_position
from stepfs_producer.plan.step import SourceState, State

CODE = SourceState("i1", "l1", epoch=2, fragment=3, debt=-5, records=40, skipped=2, tokens=3000)
PROSE = SourceState("i2", "l2", epoch=0, taken=7, debt=5, records=70, tokens=7000)
STATE = State("0123abcd", 12, {"prose": PROSE, "code": CODE}, revision=3)


def stored(state: State = STATE, **changes: object) -> bytes:
    packed: bytes = msgpack.packb({**state.position(), **changes})
    return packed


def standing(packed: bytes) -> PlanStanding:
    found = read_plan_position(packed)
    assert found is not None
    return found


def test_it_says_what_each_source_has_given() -> None:
    assert standing(stored()).document() == {
        "digest": "0123abcd",
        "step": 12,
        "tokens": 10_000,
        "sources": {
            "code": {"tokens": 3000, "share": 0.3, "records": 40, "skipped": 2, "epoch": 2},
            "prose": {"tokens": 7000, "share": 0.7, "records": 70, "skipped": 0, "epoch": 0},
        },
    }


@pytest.mark.parametrize("field", ["tokens", "records", "skipped", "epoch"])
def test_each_figure_is_the_one_that_the_planner_calls_so(field: str) -> None:
    for value in (1, 5, 1 << 62):
        source = dataclasses.replace(PROSE, **{field: value})
        document = standing(stored(State("p", 1, {"prose": source}))).document()
        assert dict(document["sources"]["prose"])[field] == value


def test_a_plan_without_a_token_has_no_shares_yet() -> None:
    document = standing(stored(State("p", 0, {"a": SourceState("i", "l")}))).document()
    assert document["sources"]["a"]["share"] == 0.0


@pytest.mark.parametrize(
    "packed", [
        b"", b"\xc1", msgpack.packb(7),
        msgpack.packb({"pipeline": "text", "v": 1}), stored(pipeline="text"), stored(v=2),
        stored(v=True), stored(plan=7), stored(step=-1), stored(step="12"), stored(sources=[]),
        stored(sources={"a": 7}), stored(sources={"a": ["i", "l", 0, 0]}),
        stored(sources={"a": ["i", "l", *[0.5] * 10]}),
        stored(sources={"a": ["i", "l", *[-1] * 10]}),
        stored(sources={7: ["i", "l", *[0] * 10]}),
    ],
)  # fmt: skip
def test_a_position_of_something_else_is_nobody_s_plan(packed: bytes) -> None:
    assert read_plan_position(packed) is None


def test_people_see_a_row_for_each_source() -> None:
    producers = {"plan": {"plan": standing(stored()).document()}, "tok-0": {"plan": None}, "of an older daemon": {}}
    assert list(plan_lines(producers)) == [
        "",
        "PRODUCER  SOURCE  TOKENS  SHARE   RECORDS  SKIPPED  EPOCH",
        "plan      prose   7000    70.00%  70       0        0",
        "plan      code    3000    30.00%  40       2        2",
    ]
    assert list(plan_lines({"tok-0": {"plan": None}})) == []


def test_a_name_of_a_writer_s_choice_reaches_no_terminal() -> None:
    sources = {"\x1b[2Jcode": SourceState("i", "l", tokens=1)}
    producers = {"\x1b]0;x": {"plan": standing(stored(State("p", 9, sources))).document()}}
    assert "\x1b" not in "".join(plan_lines(producers))
