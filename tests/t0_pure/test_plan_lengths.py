"""Several lengths in one stage: a source's documents are at most as long as it says, rows as long as the stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planned import Corpus, rules, steps

from stepfs_producer.plan.draw import Stages
from stepfs_producer.plan.file.digest import normalised, plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.file.schema import Output, Plan, Stage, Text
from stepfs_producer.plan.rules import Packing, Rules
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run.prepare import compile_plan

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
