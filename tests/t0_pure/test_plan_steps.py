"""The steps of a plan, and its position: where it stands, what it may grow to, and how it goes on from there."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import msgpack
import numpy as np
import planned
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import Corpus, next_step, rules, small_plan, steps

from stepfs.cli.commands.status import plan_lines
from stepfs.errors import RefusedError
from stepfs.format.planned import PlanStanding, read_plan_position
from stepfs_producer.plan.mix import ONE
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Exhausted, Packing, SourceRule
from stepfs_producer.plan.samples import BAD, Ahead, BlockHead, Heads, Piece, samples_after
from stepfs_producer.plan.sources import Long, SkipBudget
from stepfs_producer.plan.step import End, Need, SourceState, State, StepPlan, position_bytes_max, read_position

TEN_STEPS: list[tuple[str, int, int]] = [  # of `small_plan`: digest, tokens kept, spans
    ("3b9f10ed6ddbbf1d2c6b74bda6c425d9", 2048, 133),
    ("2c61793f11be99095c3c6ca7ff3a3124", 2045, 124),
    ("db171d7c8cd65c018b114d9b5ff6fdb4", 2046, 122),
    ("f7467a6eaa977930456f9e5088c2ec44", 2041, 143),
    ("5588d5d77d41dca34567d4a70b704ba3", 2042, 120),
    ("b8de33f964318c0e76aa0b5447d12204", 2048, 92),
    ("2701330f45948a4e274cdab855ac9bc7", 2048, 82),
    ("3cc6187a26fc122a88e03566859ffa80", 2044, 113),
    ("9b16a110e3749cf26df6ecc89a5a3410", 2030, 101),
    ("3b55a855fb0d03f5ecc6c4363168bafa", 1978, 114),
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
    monkeypatch.setattr("stepfs_producer.plan.mix._LOOP_SOURCES_MAX", 99)
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


def test_a_plan_says_what_it_leaves_out_at_its_end() -> None:
    said = []
    for blocks in range(2, 8):
        corpora = {"one": Corpus("one", longest=60, blocks=blocks)}
        chosen = rules({"one": 1}, lengths={0: 64}, ranks=4, micro_batch_tokens=64, exhausted=Exhausted.ALL)
        plans = steps(chosen, corpora, 200)
        end = next_step(Planner(chosen), plans[-1].after, corpora)
        assert isinstance(end, End)
        total = sum(max(n, 0) for b in range(blocks) for n in corpora["one"].tokens(b))
        left = total - plans[-1].after.sources["one"].tokens
        found = re.match(
            r"what is left \((\d+) samples, (\d+) tokens\) does not give .*; until: {last: pad}", end.reason
        )
        assert (0 if found is None else int(found[2])) == left
        said.append(found)
    assert any(said)


integers = st.integers(-(2**63), 2**63 - 1)
states = st.dictionaries(
    st.text(max_size=8), st.builds(SourceState, st.text(max_size=8), st.text(max_size=8), *[integers] * 14)
)


@given(states, st.integers(0, 2**63 - 1), st.none() | st.integers(0, 2**63 - 1))
def test_a_position_is_read_back_and_never_outgrows_its_bound(sources, step: int, since: int | None) -> None:
    state = State("digest", step, sources, since=since)
    stored = msgpack.packb(state.position())
    assert read_position(msgpack.unpackb(stored)) == state
    assert len(stored) <= position_bytes_max(state)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"pipeline": "text"}, "used by another pipeline"),
        ({"v": 2}, "of version 2, this program reads 1; upgrade stepfs"),
        ({"sources": {"code": ["a", "b", 1]}}, "malformed"),
        ({"sources": 3}, "malformed"),
        ({"step": None}, "malformed"),
        ({"since": "x"}, "malformed"),
    ],
)
def test_what_is_no_position_of_a_plan_is_refused(change: dict[str, object], advice: str) -> None:
    position = State("digest", 3, {"code": SourceState("a", "b")}).position()
    assert read_position(position).step == 3
    with pytest.raises(RefusedError, match=advice):
        read_position({**position, **change})


@pytest.mark.parametrize(
    ("numbers", "lacks"),
    [(11, {"dropped": 0, "plain": 0, "excluded": 0}), (12, {"plain": 0, "excluded": 0}), (13, {"excluded": 0})],
)
def test_a_position_of_before_some_records_were_counted_is_read(numbers: int, lacks: dict[str, int]) -> None:
    position = STATE.position()
    before = {**position, "sources": {name: one[: 2 + numbers] for name, one in position["sources"].items()}}  # type: ignore[attr-defined]
    assert read_position(before).sources["code"] == replace(CODE, **lacks)
    assert {name: getattr(standing(msgpack.packb(before)).sources["code"], name) for name in lacks} == lacks


def test_a_changed_plan_holds_since_the_step_at_which_it_began_until_the_next_change() -> None:
    def begun(state: State | None, digest: str) -> State:
        return Planner(replace(small_plan()[0], digest=digest)).begin(state)

    first = replace(begun(None, "a"), step=7)
    assert first.since is None
    assert "since" not in first.position()
    again = replace(begun(first, "a"), step=9)
    assert again.since is None
    changed = begun(again, "b")
    assert changed.position()["since"] == 9
    assert begun(again, "b") == changed, "killed before its first step"
    later = read_position(replace(changed, step=12).position())
    assert begun(later, "b").since == 9
    assert begun(later, "a").since == 12, "changed back"
    older = {name: one for name, one in later.position().items() if name != "since"}
    assert begun(read_position(older), "b").since is None, "another version does not say"
    packed = msgpack.packb(later.position())
    assert standing(packed).since == 9
    for wrong in (12, -1, "9", True, None):
        assert standing(msgpack.packb({**later.position(), "since": wrong})).since is None


def piece_of(tokens: list[int], records: int, *, crc32c: int = 0, **more) -> Piece:
    block = BlockHead(BlockAddress(0, 0, 0), records, BlockAddress(0, 0, 1), crc32c=crc32c)
    return Piece(block, 0, Heads(np.array(tokens, np.int64), **more))


def test_a_record_that_fim_left_is_counted_with_its_last_part() -> None:
    piece = piece_of([5, 100, 5, 80], 9, plain=np.array([False, True, False, True]))
    found = samples_after(
        "s", SourceState("", "", plain=7), Ahead((piece,)), sequence_length=64, long=Long.SPLIT, skips=None
    )
    assert [found.state_after(kept).plain for kept in range(7)] == [7, 7, 7, 8, 8, 8, 9]
    begun = found.state_after(2)
    rest = samples_after("s", begun, Ahead((piece,)), sequence_length=64, long=Long.SPLIT, skips=None)
    assert [rest.state_after(kept).plain for kept in range(5)] == [7, 8, 8, 8, 9]


def test_another_identity_is_refused_by_name() -> None:
    chosen, _ = small_plan()
    state = Planner(chosen).begin()
    other = {**state.sources, "prose": SourceState("prose-2", "")}
    with pytest.raises(RefusedError, match="source prose is not the one that this lake"):
        Planner(chosen).begin(State("digest", 5, other))


def test_a_source_that_leaves_keeps_its_place_and_hands_on_its_debt() -> None:
    chosen, corpora = small_plan()
    before = steps(chosen, corpora, 3)[-1].after
    fewer = rules({"code": 1, "prose": 1}, lengths={0: 64}, ranks=4, micro_batch_tokens=256)
    planner = Planner(fewer)
    plan = next_step(planner, planner.begin(before), {name: corpora[name] for name in fewer.sources})
    left = plan.after.sources["chats"]
    assert left.debt == 0
    assert (left.tokens, left.taken, left.block) == (
        before.sources["chats"].tokens,
        before.sources["chats"].taken,
        before.sources["chats"].block,
    )
    assert sum(source.debt for source in plan.after.sources.values()) == 0
    assert plan.after.tokens == before.tokens + plan.tokens


def samples(tokens: list[int], *, state: SourceState | None = None, **how):
    piece = piece_of(tokens, 100)
    how = {"sequence_length": 64, "long": Long.SPLIT, "skips": None, **how}
    return samples_after("s", state or SourceState("", ""), Ahead((piece,)), **how)


def test_a_budget_of_bad_records_counts_shares_runs_and_what_was_skipped_before() -> None:
    lenient = SkipBudget(Fraction(1, 10), 2)
    assert samples([5, BAD, 5]).refused_from == 1
    assert samples([5, BAD, BAD, 5], skips=lenient).refused_from is None
    assert samples([5, BAD, BAD, BAD, 5], skips=lenient).refused_from == 1
    assert samples([BAD, 5] * 11, skips=lenient).refused_from == 10  # ten are always allowed
    earlier = SourceState("", "", records=1000, skipped=99)
    assert samples([BAD, 5, BAD, 5], state=earlier, skips=lenient).refused_from == 1
    with pytest.raises(RefusedError, match="source s: too many records"):
        samples([5, BAD, 5]).refuse_if_spent(1)


def test_bad_records_are_crossed_and_counted_and_the_first_too_many_stops_the_plan() -> None:
    corpora = {"s": Corpus("s", longest=40, bad=True)}
    source = {"s": SourceRule("s", skips=SkipBudget(Fraction(1, 2), 5))}
    chosen = rules({"s": 1}, lengths={0: 64}, ranks=2, micro_batch_tokens=256, sources=source)
    end = steps(chosen, corpora, 6)[-1].after.sources["s"]
    assert 0 < end.skipped < end.records
    strict = rules({"s": 1}, lengths={0: 64}, ranks=2, micro_batch_tokens=256)
    with pytest.raises(RefusedError, match="source s: too many records could not be decoded"):
        steps(strict, corpora, 6)


def test_a_document_begun_under_split_is_finished_under_it() -> None:
    begun = SourceState("", "", into=64)
    found = samples([200, 200], state=begun, long=Long.TRUNCATE)
    assert found.tokens.tolist() == [64, 64, 8, 64]
    assert found.first.tolist() == [64, 128, 192, 0]
    assert found.lost.tolist() == [0, 136]


def test_a_state_has_the_checksum_of_the_block_that_is_begun() -> None:
    piece = piece_of([100, 5], 2, crc32c=77)
    found = samples_after("s", SourceState("", ""), Ahead((piece,)), sequence_length=64, long=Long.SPLIT, skips=None)
    assert [(found.state_after(kept).cursor[2:], found.state_after(kept).begun) for kept in range(4)] == [
        ((0, 0, 0), 0), ((0, 0, 64), 77), ((0, 1, 0), 77), ((1, 0, 0), 0),
    ]  # fmt: skip


def test_metadata_that_does_not_begin_at_the_cursor_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected metadata from \(0, 0, 1, 0\) on"):
        samples([1, 2], state=SourceState("", "", block=1))


def test_nothing_known_is_a_need_and_limits_are_ends() -> None:
    chosen, corpora = small_plan()
    planner = Planner(chosen)
    assert planner.next(planner.begin(), {}) == Need({"chats": 1, "code": 1, "prose": 1})
    for limit in ({"steps_max": 2}, {"tokens_max": 300}):
        short = rules({"code": 1}, lengths={0: 64}, ranks=4, micro_batch_tokens=64, **limit)
        plans = steps(short, {"code": corpora["code"]}, 9)
        assert len(plans) == 2
        assert isinstance(Planner(short).next(plans[-1].after, {}), End)


CODE = SourceState(
    "i1", "l1", epoch=2, fragment=3, debt=-5, records=40, skipped=2, tokens=3000, dropped=9, plain=4, excluded=6
)
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
        "since": None,
        "tokens": 10_000,
        "sources": {
            "code": {
                "tokens": 3000,
                "share": 0.3,
                "records": 40,
                "skipped": 2,
                "dropped": 9,
                "plain": 4,
                "excluded": 6,
                "epoch": 2,
            },
            "prose": {
                "tokens": 7000,
                "share": 0.7,
                "records": 70,
                "skipped": 0,
                "dropped": 0,
                "plain": 0,
                "excluded": 0,
                "epoch": 0,
            },
        },
    }


@pytest.mark.parametrize("field", ["tokens", "records", "skipped", "dropped", "plain", "excluded", "epoch"])
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
        stored(sources={"a": ["i", "l", *[0.5] * 11]}),
        stored(sources={"a": ["i", "l", *[-1] * 11]}),
        stored(sources={7: ["i", "l", *[0] * 11]}),
    ],
)  # fmt: skip
def test_a_position_of_something_else_is_nobody_s_plan(packed: bytes) -> None:
    assert read_plan_position(packed) is None


def test_people_see_a_row_for_each_source() -> None:
    producers = {"plan": {"plan": standing(stored()).document()}, "tok-0": {"plan": None}, "of an older daemon": {}}
    assert list(plan_lines(producers)) == [
        "",
        "PRODUCER  SOURCE  TOKENS  SHARE   RECORDS  SKIPPED  DROPPED  PLAIN  EXCLUDED  EPOCH",
        "plan      prose   7000    70.00%  70       0        0        0      0         0",
        "plan      code    3000    30.00%  40       2        9        4      6         2",
    ]
    assert list(plan_lines({"tok-0": {"plan": None}})) == []


def test_a_name_of_a_writer_s_choice_reaches_no_terminal() -> None:
    sources = {"\x1b[2Jcode": SourceState("i", "l", tokens=1)}
    producers = {"\x1b]0;x": {"plan": standing(stored(State("p", 9, sources))).document()}}
    assert "\x1b" not in "".join(plan_lines(producers))


DECADES = {
    "records": 1 << 62,
    "skipped": 1 << 62,
    "dropped": 1 << 62,
    "plain": 1 << 62,
    "excluded": 1 << 62,
    "tokens": 1 << 62,
    "debt": -(1 << 62),
    "run": 1 << 31,
}


def is_refused(count: int) -> bool:
    """Every one of `count` steps begins from the stored position of the one before, as after a restart."""
    budget = SkipBudget(Fraction(1, 1000), 50)
    chosen = rules(
        {"s": 1}, lengths={0: 64}, ranks=1, micro_batch_tokens=256, sources={"s": SourceRule("s", skips=budget)},
    )  # fmt: skip
    corpus = {"s": Corpus("s", longest=40, bad=True)}
    try:
        steps(chosen, corpus, count)
    except RefusedError:
        return True
    return False


def test_restarts_do_not_forgive_skipped_records() -> None:
    assert not is_refused(5)
    assert is_refused(25)


def test_a_position_that_forgets_them_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8."""

    def forgiving(value: object) -> State:
        state = read_position(value)
        return replace(state, sources={name: replace(one, skipped=0) for name, one in state.sources.items()})

    monkeypatch.setattr(planned, "read_position", forgiving)
    assert not is_refused(25)


def after_decades(state: State) -> int:
    """Bytes of the position when every number has grown."""
    place = {"epoch": 1 << 32, "fragment": 1 << 20, "block": 1 << 32, "taken": 1 << 32, "into": 1 << 32}
    place["begun"] = (1 << 32) - 1
    sources = {name: replace(one, **place, **DECADES) for name, one in state.sources.items()}
    return len(msgpack.packb(replace(state, step=1 << 62, sources=sources).position()))


@pytest.mark.parametrize("count", [1, 20, 306])
def test_a_position_is_refused_by_what_it_can_become(count: int) -> None:
    state = State("d" * 32, 0, {f"source-{n}": SourceState("i" * 16, "l" * 32) for n in range(count)})
    assert after_decades(state) <= position_bytes_max(state, counting=state.sources)
    # P9: by what it is at the start, it would be let in.
    assert len(msgpack.packb(state.position())) < after_decades(state)
