"""Steps of a plan: the same whatever is delivered when, every sample once, shares as scheduled, debts that cancel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import Corpus, next_step, rules, small_plan, steps

from stepfs_producer.plan.draw import ONE
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Exhausted, Packing, SourceRule
from stepfs_producer.plan.samples import Long
from stepfs_producer.plan.step import End, SourceState, StepPlan, read_position

TEN_STEPS: list[tuple[str, int, int]] = [  # of `small_plan`: digest, tokens kept, spans
    ("1e47b10fb560b55a132658b0b2b1420d", 2048, 133),
    ("4ff9473a8ba37961060315fbe5e71059", 2045, 124),
    ("b066b8f5bccccfee48192d1bf8a83102", 2046, 122),
    ("1bae34d02de248b73c2068212e8c11de", 2041, 143),
    ("87eeab52bb9eee211cae91df95187eb7", 2042, 120),
    ("ae12b1f11ccef4569f9d99ad0f61fcc5", 2048, 92),
    ("51f4d172183d1f7eb69dc5ea01d79350", 2048, 82),
    ("40d7f3410f0840e99a8c7c5f0d1d1d82", 2044, 113),
    ("90ac98aa86c8773078e90fc8e6f3b89c", 2030, 101),
    ("d9f3c5e1889b946d9197f894a9988851", 1978, 114),
]
few = settings(max_examples=8, deadline=None)


def test_the_first_ten_steps_are_those_of_the_table() -> None:
    plans = steps(*small_plan(), 10)
    assert [(plan.digest(), plan.tokens, len(plan.spans)) for plan in plans] == TEN_STEPS


@few
@given(st.data())
def test_groups_and_what_comes_early_do_not_show(data: st.DataObject) -> None:
    generous = {name: data.draw(st.integers(1, 9)) for name in ("code", "prose", "chats")}
    group = data.draw(st.integers(1, 40))
    plans = steps(*small_plan(), 4, group=group, generous=generous.__getitem__)
    assert [plan.digest() for plan in plans] == [digest for digest, *_ in TEN_STEPS[:4]]


@few
@given(st.integers(0, 9))
def test_a_plan_continues_from_any_position(step: int) -> None:
    chosen, corpora = small_plan()
    at = steps(chosen, corpora, step)[-1].after if step else Planner(chosen).begin()
    stored = read_position(at.position())
    again = Planner(chosen)
    plan = next_step(again, again.begin(stored), corpora)
    assert isinstance(plan, StepPlan)
    assert plan.digest() == TEN_STEPS[step][0]


def taken(plans: list[StepPlan]) -> dict[str, list[tuple[int, ...]]]:
    """Source → (epoch, fragment, block, record, first, tokens) of all spans, sorted."""
    found = defaultdict(list)
    for plan in plans:
        for *_, tokens, source, epoch, fragment, block, record, first in plan.spans.tolist():
            found[plan.sources[source]].append((epoch, fragment, block, record, first, tokens))
    return {name: sorted(spans) for name, spans in found.items()}


def below(corpus: Corpus, end: SourceState) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """The records below a cursor: block, number in it, tokens."""
    for block in range(64 * end.epoch + 2 * end.fragment + end.block + 1):
        here = corpus.place(block)
        stop = end.taken if here == (end.epoch, end.fragment, end.block) else None
        for record, tokens in enumerate(corpus.tokens(block)[:stop]):
            yield here, record, tokens


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("long", Long)
def test_every_token_below_the_cursors_is_in_exactly_one_span(packing: Packing, long: Long) -> None:
    names = {"code": 30, "prose": 70}
    sources = {name: SourceRule(f"{name}-1", long=long) for name in names}
    chosen = rules(names, lengths={0: 64}, ranks=4, micro_batch_tokens=256, packing=packing, sources=sources)
    corpora = {"code": Corpus("code", longest=200), "prose": Corpus("prose", longest=90)}
    plans = steps(chosen, corpora, 8)
    lost = dict.fromkeys(names, 0)
    for plan in plans:
        lost = {name: lost[name] + plan.lost[name] for name in names}
    for name, corpus in corpora.items():
        end = plans[-1].after.sources[name]
        spans = taken(plans)[name]
        crossed = 0
        for here, record, tokens in below(corpus, end):
            place = (*here, record)
            mine = [spans.pop(0) for _ in range(sum(span[:4] == place for span in spans))]
            assert [first for *_, first, _ in mine] == [0, *accumulate(count for *_, count in mine)][: len(mine)]
            got = sum(count for *_, count in mine)
            assert got == {
                Long.SPLIT: tokens,
                Long.TRUNCATE: min(tokens, 64),
                Long.DROP: tokens if tokens <= 64 else 0,
            }[long] or (packing is Packing.CONCAT and long is Long.TRUNCATE and 0 < got < 64 < tokens)
            crossed += tokens
        assert sum(count for *_, count in spans) == end.into  # of the document that the last step cut
        assert end.tokens + lost[name] == crossed + end.into


def test_no_document_is_cut_that_fits() -> None:
    chosen, corpora = small_plan()
    for plan in steps(chosen, corpora, 6):
        assert plan.cut == 0
        for *_, tokens, source, epoch, fragment, block, record, first in plan.spans.tolist():
            name = plan.sources[source]
            whole = corpora[name].tokens(64 * epoch + 2 * fragment + block)[record]
            assert tokens == min(whole - first, plan.sequence_length)


def test_spans_are_in_reading_order_and_stand_end_to_end() -> None:
    for plan in steps(*small_plan(), 6):
        ranks, micro, rows = plan.shape
        places = [tuple(span[:4]) for span in plan.spans.tolist()]
        assert places == sorted(places)
        assert places[-1][:3] <= (ranks - 1, micro - 1, rows - 1)
        for before, after in pairwise(plan.spans.tolist()):
            assert after[3] == (before[3] + before[4] if before[:3] == after[:3] else 0)
            assert before[3] + before[4] <= plan.sequence_length
        assert plan.costs.shape == (ranks, micro)


def test_debts_cancel_and_shares_stay_near_the_schedule() -> None:
    chosen, corpora = small_plan()
    plans = steps(chosen, corpora, 12)
    wanted = [0] * 3
    for plan in plans:
        assert sum(source.debt for source in plan.after.sources.values()) == 0
        assert sum(plan.shares) == ONE
        wanted = [total + share * plan.tokens for total, share in zip(wanted, plan.shares, strict=True)]
        if plan.step != 4:  # in which chats ends: what it owes is handed on before the next
            debts = [abs(source.debt) for source in plan.after.sources.values()]
            assert max(debts) <= 2 * plan.sequence_length * ONE
    kept = [plans[-1].after.sources[name].tokens for name in plans[0].sources]
    live = [1, 2]  # the first source, chats, is exhausted, and what it owed is handed on
    assert all(abs(wanted[index] - kept[index] * ONE) <= 400 * ONE for index in live)
    assert plans[-1].shares[0] == 0
    assert plans[-1].after.sources["chats"].debt == 0


def test_many_sources_are_drawn_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"s{index:02}": index % 5 + 1 for index in range(20)}
    corpora = {name: Corpus(name, longest=60, blocks=9 if name < "s04" else None) for name in names}
    chosen = rules(names, lengths={0: 64}, ranks=2, micro_batch_tokens=512)
    vectors = [plan.digest() for plan in steps(chosen, corpora, 6)]
    monkeypatch.setattr("stepfs_producer.plan.draw._LOOP_SOURCES_MAX", 99)
    assert [plan.digest() for plan in steps(chosen, corpora, 6)] == vectors


@pytest.mark.parametrize("exhausted", Exhausted)
def test_a_plan_ends_with_its_first_or_its_last_source(exhausted: Exhausted) -> None:
    names = {"long": 1, "short": 1}
    corpora = {"long": Corpus("long", longest=60, blocks=60), "short": Corpus("short", longest=60, blocks=12)}
    chosen = rules(names, lengths={0: 64}, ranks=2, micro_batch_tokens=128, exhausted=exhausted)
    plans = steps(chosen, corpora, 200)
    end = next_step(Planner(chosen), plans[-1].after, corpora)
    assert isinstance(end, End)
    total = {
        name: sum(max(n, 0) for b in range(corpus.blocks) for n in corpus.tokens(b)) for name, corpus in corpora.items()
    }
    left = {name: total[name] - plans[-1].after.sources[name].tokens for name in names}
    if exhausted is Exhausted.FIRST:
        assert end.reason == "source short is exhausted"
        assert left["short"] < 256
        assert left["long"] > 1000
    else:
        assert sum(left.values()) < 256  # what would have left a micro-batch without a token
