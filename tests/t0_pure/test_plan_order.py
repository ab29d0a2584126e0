"""Which records a plan draws: their order, the shares of their sources, and the lengths of pieces."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import Corpus, rules, steps

from stepfs_producer.plan.file.digest import normalised, plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.mix import ONE, MixEntry, MixSchedule, Stages, apportion, normalise
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.order import block_key, fragment_order, record_key, record_order
from stepfs_producer.plan.parts import Output, Stage
from stepfs_producer.plan.rules import Packing, Rules
from stepfs_producer.plan.sources import Text
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run.prepare import compile_plan

KEYS = {  # seed, epoch, source, fragment
    (0, 0, "code", 0): "ae33afd04bcd0ae684378efb77eaece1",
    (0, 0, "code", 1): "a07463ac4acfdc34d150e3d76073d6d5",
    (20260701, 3, "prose", 1048575): "467f43700862c7279911e98fc296bd9a",
    (2**64 - 1, 1, "grüße", 2): "e1a9f4cf3510049e685e0c8ae48bed5c",
}


@pytest.mark.parametrize("of", KEYS)
def test_keys_are_those_of_the_table(of: tuple[int, int, str, int]) -> None:
    assert block_key(*of, 0).hex() == KEYS[of]


@pytest.mark.parametrize("of", KEYS)
def test_a_key_hashes_exactly_the_bytes_that_the_design_names(of: tuple[int, int, str, int]) -> None:
    seed, epoch, source, index = of
    name = source.encode()
    data = b"stepfs-order-1\0" + struct.pack(f"<QQI{len(name)}sQ", seed, epoch, len(name), name, index)
    assert block_key(*of, 0) == hashlib.blake2b(data, digest_size=16).digest()


def test_the_first_block_has_its_fragments_key_and_the_others_one_of_their_own() -> None:
    assert block_key(0, 0, "code", 1, 0).hex() == KEYS[0, 0, "code", 1]
    assert block_key(0, 0, "code", 1, 1).hex() == "8b96546e8411a2b06ac530a5c5598aa2"
    assert record_key(1, 2, "code", 3, 4).hex() == "6b31d09b1000d67fa9157965dc8c747a"
    assert record_key(1, 2, "code", 3, 4) != block_key(1, 2, "code", 3, 4)


def test_orders_are_those_of_the_table() -> None:
    assert fragment_order(0, 0, "code", 12) == [3, 7, 8, 10, 4, 6, 9, 1, 11, 0, 5, 2]
    assert fragment_order(0, 1, "code", 12) == [11, 4, 0, 6, 9, 10, 8, 7, 2, 3, 1, 5]
    assert record_order(block_key(0, 0, "code", 0, 0), 12).tolist() == [5, 1, 7, 3, 4, 11, 8, 9, 10, 2, 6, 0]
    assert record_order(block_key(0, 0, "code", 0, 1), 12).tolist() == [2, 8, 11, 6, 1, 7, 9, 10, 0, 4, 5, 3]


def test_the_raw_bits_are_those_of_philox_4x64() -> None:
    bits = np.random.Philox(key=int.from_bytes(block_key(0, 0, "code", 0, 0), "little"), counter=0)
    assert bits.random_raw(3).tolist() == [18076632817441623157, 4134148855306210376, 13107138745905252416]


@given(st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_every_epoch_has_every_fragment_and_record_once(seed: int, count: int) -> None:
    assert sorted(fragment_order(seed, 0, "s", count)) == list(range(count))
    assert sorted(record_order(block_key(seed, 0, "s", 0, 0), count).tolist()) == list(range(count))


def test_without_shuffle_all_is_as_listed() -> None:
    assert fragment_order(0, 0, "code", 5, shuffle=False) == [0, 1, 2, 3, 4]
    assert record_order(block_key(0, 0, "code", 0, 0), 4, shuffle=False).tolist() == [0, 1, 2, 3]


weights = st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any)


@given(st.integers(-(10**15), 10**15), weights)
def test_what_is_apportioned_sums_up_and_is_off_by_less_than_one(total: int, chosen: list[int]) -> None:
    shares = apportion(total, chosen)
    assert sum(shares) == total
    whole = sum(chosen)
    assert all(abs(share * whole - total * weight) < whole for share, weight in zip(shares, chosen, strict=True))


def test_the_largest_remainders_get_the_rest_and_ties_go_to_the_smaller_name() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(-10, [1, 1, 1]) == [-3, -3, -4]
    assert normalise({"a": Fraction(1), "b": Fraction(1), "c": Fraction(1)}, ["a", "b", "c"]) == (
        1431655766,
        1431655765,
        1431655765,
    )


@given(weights, st.integers(1, 1000))
def test_scaling_all_weights_changes_no_share(chosen: list[int], factor: int) -> None:
    names = [f"s{index:02}" for index in range(len(chosen))]
    plain = normalise(dict(zip(names, map(Fraction, chosen), strict=True)), names)
    scaled = {name: Fraction(weight, factor) for name, weight in zip(names, chosen, strict=True)}
    assert normalise(scaled, names) == plain
    assert sum(plain) == ONE


def test_a_ramp_is_linear_from_the_entry_before_and_then_holds() -> None:
    quarter = ONE // 4
    mix = MixSchedule(
        [MixEntry(0, (ONE, 0)), MixEntry(100, (3 * quarter, quarter)), MixEntry(200, (quarter, 3 * quarter), ramp=True)]
    )
    assert mix.shares(99) == (ONE, 0)
    assert mix.shares(100) == (3 * quarter, quarter)
    assert mix.shares(150) == (2 * quarter, 2 * quarter)
    assert mix.shares(101) == (3 * quarter - 21474836, quarter + 21474836)  # 21474836.48 a step
    assert mix.shares(102) == (3 * quarter - 42949673, quarter + 42949673)  # of .96, the larger remainder
    assert mix.shares(200) == mix.shares(10**9) == (quarter, 3 * quarter)


@given(weights, st.integers(1, 10**6), st.data())
def test_shares_sum_to_one_at_every_step_of_a_ramp(chosen: list[int], span: int, data: st.DataObject) -> None:
    goal = data.draw(st.permutations(chosen))
    mix = MixSchedule(
        [MixEntry(0, tuple(apportion(ONE, chosen))), MixEntry(span, tuple(apportion(ONE, goal)), ramp=True)]
    )
    step = data.draw(st.integers(0, span + 1))
    assert sum(mix.shares(step)) == ONE
    assert min(mix.shares(step)) >= 0


def test_a_stage_holds_from_its_step_on() -> None:
    stages = Stages({0: 4096, 8000: 16384})
    assert [stages.sequence_length(step) for step in (0, 7999, 8000, 9000)] == [4096, 4096, 16384, 16384]


ROW = 32768
OF_SOURCE = {"code": 4096, "long": ROW, "prose": 8192}
WEIGHTS = {"code": 1, "long": 1, "prose": 2}


def several(packing: Packing) -> Rules:
    """Sixteen rows a step."""
    chosen = rules(
        WEIGHTS, lengths={0: ROW}, ranks=8, micro_batches=2, micro_batch_tokens=ROW, packing=packing,
    )  # fmt: skip
    return replace(chosen, stages=Stages({0: ROW}, {0: OF_SOURCE}))


def corpora() -> dict[str, Corpus]:
    return {name: Corpus(name, longest=60_000) for name in WEIGHTS}


def longest(plans: list[StepPlan]) -> dict[str, int]:
    spans = np.concatenate([plan.spans for plan in plans])
    return {name: int(spans[spans[:, 5] == index, 4].max()) for index, name in enumerate(sorted(WEIGHTS))}


@pytest.mark.parametrize("packing", Packing)
def test_no_span_is_longer_than_its_source_says_and_rows_are_full(packing: Packing) -> None:
    plans = steps(several(packing), corpora(), 12)
    found = longest(plans)
    assert all(found[name] == OF_SOURCE[name] for name in ("code", "prose"))
    assert ROW // 2 < found["long"] <= ROW
    assert sum(plan.tokens for plan in plans) / sum(plan.room for plan in plans) >= 0.97
    assert all(plan.sequence_length == ROW for plan in plans)


def test_no_token_is_lost_between_the_pieces_of_a_document() -> None:
    ends: dict[tuple[int, ...], int] = {}
    for plan in steps(several(Packing.CONCAT), corpora(), 6):
        for *_, tokens, source, epoch, fragment, block, record, first in sorted(
            plan.spans.tolist(), key=lambda span: span[5:]
        ):
            place = (source, epoch, fragment, block, record)
            assert ends.get(place, 0) == first
            ends[place] = first + tokens
    assert len(ends) > 40


def test_a_length_may_change_with_the_stage_in_the_middle_of_a_document() -> None:
    chosen = rules({"a": 1}, lengths={0: 64, 3: 128}, ranks=2, micro_batch_tokens=256, packing=Packing.CONCAT)
    chosen = replace(chosen, stages=Stages({0: 64, 3: 128}, {0: {"a": 16}, 3: {"a": 32}}))
    plans = steps(chosen, {"a": Corpus("a", longest=900)}, 8)
    assert {int(plan.spans[:, 4].max()) for plan in plans[:3]} == {16}
    assert {int(plan.spans[:, 4].max()) for plan in plans[3:]} == {32}
    assert plans[2].after.sources["a"].into, "the third step ends in the middle of a document"


SOURCES = {"code": Text("x"), "prose": Text("y")}


def test_a_source_says_it_for_every_stage_and_a_stage_for_itself() -> None:
    own = {**SOURCES, "prose": Text("y", sequence_length=4096)}
    plan = Plan(
        output=Output(mesh="dp=2"),
        stages=[
            Stage(sequence_length=4096),
            Stage(from_=5, sequence_length=16384),
            Stage(from_=9, sequence_length=16384, lengths={"prose": 8192, "code": 16384}),
        ],
        sources=own,
    )
    stages = compile_plan(plan, listings={}, tokenizer_digest="").rules.stages
    assert [stages.sample_length(step, "prose") for step in (0, 5, 8, 9)] == [4096, 4096, 4096, 8192]
    assert [stages.sample_length(step, "code") for step in (0, 5, 9)] == [4096, 16384, 16384]


def test_all_ways_to_say_it_are_one_plan_and_none_is_identity() -> None:
    output = Output(mesh="dp=2", sequence_length=8192)
    plain = Plan(output=output, sources=SOURCES)
    by_source = Plan(output=output, sources={**SOURCES, "prose": Text("y", sequence_length=4096)})
    by_stage = Plan(
        output=Output(mesh="dp=2"),
        stages=[Stage(sequence_length=8192, lengths={"prose": 4096, "code": 8192})],
        sources=SOURCES,
    )
    assert plan_text(by_source) == plan_text(by_stage) != plan_text(plain)
    assert plan_text(plan_of_text(plan_text(by_source))) == plan_text(by_source)
    rows = Text("y", sequence_length=8192)
    assert plan_digest(Plan(output=output, sources={**SOURCES, "prose": rows})) == plan_digest(plain)
    assert "lengths" not in normalised(plain)["stages"][0]
    found = [
        {
            name: rule.identity
            for name, rule in compile_plan(one, listings={}, tokenizer_digest="").rules.sources.items()
        }
        for one in (plain, by_source)
    ]
    assert found[0] == found[1]
