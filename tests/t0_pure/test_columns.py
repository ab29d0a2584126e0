"""Columns beside tokens: rows of records, in plans and in files."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import torch
from declared import column_spec, tokenizer_spec, transform_spec
from finished import ran
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import rules
from step_tasks import EXAMPLE, tasks
from transformed import made, records_of

from stepfs.errors import RefusedError, UsageError
from stepfs.torch import micro_batches
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import (
    Columns,
    PayloadSpec,
    SampleGroup,
    StepSpans,
    StepTask,
    columns_of,
    cut_to,
    gathered,
)
from stepfs_producer.plan.balance import MEAN, Method, Over, deal, normalised, partition_of_loads
from stepfs_producer.plan.cost import CostModel
from stepfs_producer.plan.file.digest import normalised as settings_of
from stepfs_producer.plan.file.digest import plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.parts import Balance, Output
from stepfs_producer.plan.parts import Cost as PlanCost
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.rules import SourceRule
from stepfs_producer.plan.samples import Ahead, BlockHead, Heads, Piece, samples_after
from stepfs_producer.plan.sources import Column, Images, Long, Parquet, Text
from stepfs_producer.plan.spans import Gathered, Span
from stepfs_producer.plan.step import End, SourceState, StepPlan
from stepfs_producer.run.prepare import CompiledPlan, compile_plan, grid_of, modules_of
from stepfs_producer.sources.record import Kind

GRID, PIXELS = column_spec("grid", "int32", (3,)), column_spec("pixels", "uint8", (6,))
SPECS = (GRID, PIXELS)
CALLED = transform_spec(tokenizer_spec(eos="none"), "user_functions:pictured", SPECS)


def pictures(counts: list[tuple[int, int]]) -> Columns:
    """Samples whose rows say whose they are."""
    return columns_of(
        SPECS,
        [
            {"grid": np.full((grid, 3), sample, np.int32), "pixels": np.full((pixels, 6), sample % 251, np.uint8)}
            for sample, (grid, pixels) in enumerate(counts)
        ],
    )


COUNTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=9)


@given(st.lists(COUNTS, min_size=1, max_size=3), st.booleans(), st.data())
def test_rows_are_gathered_in_the_order_of_the_spans(given, bare, data) -> None:
    """Also beside a group whose source gives none."""
    samples = [(group, sample) for group, counts in enumerate(given) for sample in range(len(counts))]
    spans = data.draw(st.lists(st.sampled_from(samples), min_size=1))
    groups = [group_of(len(counts), pictures(counts)) for counts in given] + [group_of(1, ())] * bare
    spans += [(len(given), 0)] * bare
    counts = [[0, 0] if group == len(given) else list(given[group][sample]) for group, sample in spans]
    table = np.zeros((len(spans), len(Gathered) + 7), np.int64)
    table[:, Gathered.GROUP], table[:, Gathered.RECORD] = np.array(spans).T
    table[:, Span.TOKENS] = 1
    step = StepSpans((1, 1, 1), 99, ("s",), table, np.array(counts))
    got = gathered(step, groups)
    for column, rows in enumerate(got.columns):
        expected = [sample for (_, sample), mine in zip(spans, counts, strict=True) for _ in range(mine[column])]
        assert rows.values[:, 0].tolist() == expected
        assert rows.values.dtype == SPECS[column].column.dtype
    if sum(map(sum, counts)):  # hazard P17
        with pytest.raises(AssertionError, match="columns stay with their tokens"):
            gathered(replace(step, rows=step.rows + (step.rows > 0)), groups)


def group_of(samples: int, columns: Columns) -> SampleGroup:
    numbers = np.arange(samples)
    return SampleGroup(Ragged(np.zeros(samples, np.int32), numbers + 1), None, numbers, numbers, columns)


def called(*values: dict):
    return made(CALLED, records_of(Kind.JSON, [json.dumps(value).encode() for value in values]))


def test_what_a_function_gives_is_copied_and_stays_with_its_sample() -> None:
    result = called(
        {"pixels": 1},
        {"pixels": 2, "rows": 1, "columns": {"grid": ["int32", [2, 3]]}, "value": 9},
        {"ids": [], "pixels": 3},  # no token: no sample, so no row either
        {"text": "abc", "pixels": 4, "rows": 2},
        {"ids": [1]},
        {"ids": [1], "pixels": 5, "rows": 0},
    )
    assert result.bad == {}
    assert result.heads.tokens.tolist() == [2, 2, 0, 3, 1, 1]
    assert result.heads.rows.tolist() == [[0, 4], [2, 1], [0, 0], [0, 2], [0, 0], [0, 0]]
    assert result.samples.columns[1].values[:, 0].tolist() == [1, 1, 1, 1, 2, 4, 4]
    assert result.samples.columns[0].values.tolist() == [[9, 9, 9]] * 2
    plain = transform_spec(tokenizer_spec(eos="none"), "user_functions:pictured")
    assert made(plain, records_of(Kind.JSON, [b"{}"])).samples.columns == ()


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"columns": {"pixel": ["uint8", [1, 6]]}, "value": 0}, "'pixel', which the plan does not declare; did you"),
        ({"columns": {"audio": ["uint8", [1]]}, "value": 0}, "'audio', which the plan does not declare; declare it"),
        ({"columns": {"pixels": ["int8", [1, 6]]}, "value": 0}, "'pixels' as int8 [1, 6], declared as uint8 [rows, 6]"),
        ({"columns": {"pixels": ["uint8", [1, 7]]}, "value": 0}, "'pixels' as uint8 [1, 7], declared as uint8 [rows, 6]"),
        ({"columns": {"pixels": ["uint8", [6]]}, "value": 0}, "'pixels' as uint8 [6], declared as uint8 [rows, 6]"),
        ({"raw": {"grid": 3}}, "'grid' as int64 [], declared as int32 [rows, 3]"),
        ({"raw": {"grid": [[1], [1, 2]]}}, "the column 'grid' that is no array"),
        ({"raw": [1]}, "columns of type list; return arrays by name"),
    ],
)  # fmt: skip
def test_what_is_not_as_declared_makes_that_record_bad(record, why) -> None:
    result = called({"pixels": 7}, record)
    assert result.heads.tokens.tolist() == [2, -1]
    assert why in result.bad[1]
    assert result.bad[1].startswith("user_functions:pictured returned ")
    assert result.heads.rows.tolist() == [[0, 4], [0, 0]]


def with_columns(task: StepTask) -> StepTask:
    return replace(task, columns=pictures([(span % 2, span % 3) for span in range(len(task.spans))]))


def spec_of(ext: str, *, own: bool = False, of_micro_batch: bool = False) -> PayloadSpec:
    columns = (GRID, column_spec("pixels", "uint8", (6,), own_file=own))
    return PayloadSpec(ext, True, 0, 1 << 20, of_micro_batch, columns)


def opened(ext: str, payload: bytes) -> dict:
    if ext == ".pt":
        return torch.load(io.BytesIO(payload), weights_only=True)
    return {name: torch.from_numpy(array) for name, array in safetensors.numpy.load(payload).items()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ext", [".safetensors", ".pt"])
@settings(max_examples=20, deadline=None)
@given(drawn=tasks())
def test_a_file_has_the_rows_of_its_spans_as_declared(ext, own, drawn) -> None:
    task = with_columns(drawn[0])
    spec = spec_of(ext, own=own)
    payloads, records = construct(spec, task)
    each = 2 if own else 1
    assert len(payloads) == len(records) == each * task.shape[0]
    assert records[0::each] == np.bincount(task.spans[:, 0], minlength=task.shape[0]).tolist()
    assert not own or records[1::2] == [0] * task.shape[0]
    for rank in range(task.shape[0]):
        batch = opened(ext, payloads[each * rank])
        beside = opened(ext, payloads[each * rank + 1]) if own else batch
        spans = np.flatnonzero(task.spans[:, 0] == rank)
        assert batch["grid_counts"].tolist() == (spans % 2).tolist()
        assert batch["pixels_counts"].tolist() == (spans % 3).tolist()
        assert batch["grid"].tolist() == [[span] * 3 for span in spans for _ in range(span % 2)]
        assert beside["pixels"].tolist() == [[span % 251] * 6 for span in spans for _ in range(span % 3)]
        assert ("pixels" in batch) is not own
        for file, column in ((batch, "grid"), (beside, "pixels")):
            declared = {one.name: one.column for one in SPECS}[column]
            assert (str(file[column].dtype), file[column].shape[1:]) == (f"torch.{declared.dtype}", declared.shape)
        assert batch["grid_counts"].dtype == batch["pixels_counts"].dtype == torch.int32
    assert construct(spec, cut_to(task, [0]))[0] == payloads[:each]


@pytest.mark.parametrize("ext", [".safetensors", ".pt"])
@pytest.mark.parametrize("own", [False, True])
@settings(max_examples=20, deadline=None)
@given(drawn=tasks())
def test_the_micro_batches_of_a_file_have_their_own_rows(ext, own, drawn) -> None:
    task = with_columns(drawn[0])
    whole, _ = construct(spec_of(ext, own=own), task)
    parts, _ = construct(spec_of(ext, own=own, of_micro_batch=True), task)
    each = 2 if own else 1
    split = [part for payload in whole[::each] for part in micro_batches(opened(ext, payload))]
    alone = [opened(ext, payload) for payload in parts[::each]]
    assert len(split) == len(alone)
    for part, file in zip(split, alone, strict=True):
        arrays = {name: value.tolist() for name, value in file.items() if isinstance(value, torch.Tensor)}
        assert {name: part[name].tolist() for name in arrays} == arrays


@pytest.mark.parametrize("own", [False, True])
def test_a_tar_has_them_in_each_sample(own) -> None:
    payloads, _ = construct(spec_of(".tar", own=own), with_columns(EXAMPLE))
    read = []
    for payload in payloads:
        with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
            names = [name for name in archive.getnames() if name.split(".")[1] in {"pixels", "grid_counts"}]
            members = {name: np.load(io.BytesIO(archive.extractfile(name).read())).tolist() for name in names}
            read.append({name.split(".", 1)[1]: value for name, value in members.items() if "padding" not in name})
    if own:
        assert read[0].keys() == {"grid_counts.npy"}
        assert read[1] == {"pixels.npy": [[1] * 6]}  # of the third micro-batch; the first has none, of the same key
    else:
        assert read[0] == {"grid_counts.npy": [1], "pixels.npy": [[1] * 6]}
    assert len(read) == (4 if own else 2)


def test_a_step_without_rows_has_the_arrays_all_the_same() -> None:
    payloads, _ = construct(spec_of(".safetensors"), EXAMPLE)
    batch = opened(".safetensors", payloads[0])
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((0, 6), torch.uint8)
    assert batch["grid_counts"].tolist() == [0, 0]
    plain = replace(spec_of(".safetensors"), columns=())
    assert "pixels" not in opened(".safetensors", construct(plain, EXAMPLE)[0][0])


def piece(tokens, rows, first: int = 0, records: int | None = None) -> Piece:
    table = None if rows is None else np.array(rows, np.int64)
    count = len(tokens) if records is None else records
    block = BlockHead(BlockAddress(0, 0, 0), count, BlockAddress(0, 1, 0))
    return Piece(block, first, Heads(np.array(tokens, np.int64), table))


@pytest.mark.parametrize("long", Long)
def test_a_sample_with_rows_is_whole_or_dropped_and_counted(long: Long) -> None:
    ahead = Ahead([piece([5, 20, 20, 8], [[1, 0], [0, 3], [0, 0], [0, 1]])])
    got = samples_after("s", SourceState("i", "l"), ahead, sequence_length=8, long=long, skips=None)
    text = {Long.SPLIT: [8, 8, 4], Long.TRUNCATE: [8], Long.DROP: []}[long]
    assert got.tokens.tolist() == [5, *text, 8]
    assert got.lost.tolist() == [0, 20, 20 - sum(text), 0]
    assert got.lost_by(len(got.tokens)) == 40 - sum(text)
    end = got.state_after(len(got.tokens))
    assert (end.fragment, end.taken, end.into, end.records) == (1, 0, 0, 4)


@pytest.mark.parametrize(("long", "rows"), [(Long.SPLIT, [[1]]), (Long.DROP, None)])
def test_a_source_of_which_nothing_ever_fits_is_refused_and_not_read_for_ever(long, rows) -> None:
    epochs = [
        Piece(
            BlockHead(BlockAddress(epoch, 0, 0), 1, BlockAddress(epoch + 1, 0, 0)),
            0,
            Heads(np.array([20]), None if rows is None else np.array(rows)),
        )
        for epoch in range(3)
    ]

    def samples(count: int, length: int):
        ahead = Ahead(epochs[:count])
        return samples_after("s", SourceState("i", "l"), ahead, sequence_length=length, long=long, skips=None)

    assert len(samples(2, 8).tokens) == 0
    assert len(samples(3, 20).tokens) == 3
    why = "source s: a whole epoch of it gives no sample, because all are longer than 8"
    with pytest.raises(RefusedError, match=why):
        samples(3, 8)


def test_pieces_with_and_without_rows_follow_each_other() -> None:
    ahead = Ahead([piece([3], None, records=2), piece([4], [[0, 2]], first=1, records=2)])
    got = samples_after("s", SourceState("i", "l"), ahead, sequence_length=8, long=Long.SPLIT, skips=None)
    assert got.heads.rows.tolist() == [[0, 0], [0, 2]]
    behind = SourceState("i", "l", into=2)
    with pytest.raises(ValueError, match="has columns, and 2 tokens of it are taken"):
        samples_after("s", behind, Ahead([piece([4], [[1]])]), sequence_length=8, long=Long.SPLIT, skips=None)


def records(count: int, seed: int = 0) -> tuple[list[int], list[list[int]]]:
    """Tokens and rows [grid, pixels]: a third of them with an image, some of these too long for 64 tokens."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 50, count)
    pixels = np.where(draw.random(count) < 1 / 3, draw.integers(1, 200, count), 0)
    tokens += pixels // 4
    return tokens.tolist(), np.stack([pixels > 0, pixels], axis=1).astype(np.int64).tolist()


def planned(**more) -> tuple[StepPlan, list[int], list[list[int]]]:
    tokens, rows = records(400)
    settings = {"lengths": {0: 64}, "ranks": 4, "micro_batches": 2, "micro_batch_tokens": 256}
    chosen = rules({"s": 1}, columns=("grid", "pixels"), **settings, **more)
    planner = Planner(chosen)
    plan = planner.next(planner.begin(), {"s": Ahead([piece(tokens, rows)], ended=True)})
    assert isinstance(plan, StepPlan)
    return plan, tokens, rows


def test_a_plan_that_ends_because_nothing_fits_says_so() -> None:
    planner = Planner(rules({"s": 1}, columns=("pixels",), lengths={0: 16}, ranks=1, micro_batch_tokens=16))
    ended = planner.next(planner.begin(), {"s": Ahead([piece([20, 30], [[1], [2]])], ended=True)})
    lost = "its last 50 tokens were of records longer than a row, and dropped"
    assert ended == End(f"every source is exhausted; {lost}", {"s": (2, 0)})


def test_spans_carry_the_rows_of_their_records_and_a_record_with_rows_is_one_span() -> None:
    plan, tokens, rows = planned()
    taken = plan.after.sources["s"].taken
    seen = {}
    for span in plan.spans.tolist():
        record, first = span[9], span[10]
        assert span[len(Span) :] == rows[record]
        if any(rows[record]):
            assert (first, span[4]) == (0, tokens[record])
            assert record not in seen
        seen[record] = True
    dropped = [index for index in range(taken) if index not in seen]
    assert dropped
    assert all(tokens[index] > 64 and any(rows[index]) for index in dropped)
    assert plan.lost == {"s": sum(tokens[index] for index in dropped)}


def test_the_price_of_a_row_is_added_to_the_cost_and_a_function_gets_the_counts() -> None:
    plan, _, _ = planned(cost=CostModel(3, 0, prices=(("pixels", 1000),)))
    assert int(plan.costs.sum()) == 3 * plan.tokens + 1000 * int(plan.spans[:, -1].sum())
    called, _, _ = planned(cost=CostModel(call=lambda samples: samples["pixels"] + 2 * samples["grid"]))
    assert int(called.costs.sum()) == int((called.spans[:, -1] + 2 * called.spans[:, -2]).sum())


def test_prices_that_overflow_are_refused_with_a_divisor() -> None:
    with pytest.raises(UsageError, match=r"overflow the cost; divide the prices of the cost by \d+"):
        planned(cost=CostModel(1, 0, prices=(("pixels", 1 << 62),)))
    with pytest.raises(UsageError, match=r"divide the cost by \d+|divide them by \d+"):
        planned(cost=CostModel(1, 0, prices=(("pixels", 1 << 50),)))


def dealt(loads: np.ndarray, ranks: int, over: Over, micro_batches: int = 1) -> np.ndarray:
    return deal(loads, ranks=ranks, micro_batches=micro_batches, method=Method.AUTO, over=over)


def slowest(load: np.ndarray) -> float:
    """Where ranks meet at every micro-batch."""
    return float(load.max(axis=0).sum() * len(load) / load.sum())


def test_two_loads_are_both_more_even_than_by_their_sum() -> None:
    cost = CostModel(6 * 64, 1, prices=(("pixels", 300),))
    both, *_ = planned(cost=cost, loads=("tokens", "pixels"))
    one, *_ = planned(cost=cost)
    assert both.loads.keys() == {"tokens", "pixels"}
    assert one.loads == {}
    assert int(both.loads["pixels"].sum()) == int(both.spans[:, -1].sum())
    assert int(both.costs.sum()) == int(both.loads["tokens"].sum()) + 300 * int(both.loads["pixels"].sum())
    pixels = np.zeros((4, 2), np.int64)
    np.add.at(pixels, (one.spans[:, 0], one.spans[:, 1]), one.spans[:, -1])
    assert slowest(both.loads["pixels"]) < slowest(pixels)
    assert slowest(both.loads["tokens"]) < 1.2


LOADS = st.integers(1, 4).flatmap(
    lambda bins: st.tuples(
        st.just(bins),
        st.lists(st.tuples(st.integers(0, 1 << 53), st.integers(0, 50)), min_size=bins, max_size=8 * bins).map(
            lambda rows: np.array(rows[: len(rows) // bins * bins], np.int64)
        ),
    )
)


@given(LOADS)
def test_every_row_is_in_one_bin_of_equal_counts_and_bins_of_the_same_loads_are_the_same(drawn) -> None:
    bins, loads = drawn
    units = normalised(loads, bins)
    found = partition_of_loads(units, bins)
    assert sorted(found.ravel().tolist()) == list(range(len(loads)))
    assert found.shape == (bins, len(loads) // bins)
    assert (partition_of_loads(units.copy(), bins) == found).all()
    for column, total in enumerate(loads.astype(object).sum(axis=0)):
        expected = [int(load) * bins * MEAN // max(int(total), 1) for load in loads[:, column]]
        assert units[:, column].tolist() == expected


@settings(max_examples=25, deadline=None)
@given(LOADS, st.sampled_from(Over))
def test_the_larger_load_is_no_worse_than_dealing_rows_heaviest_first_in_turn(drawn, over) -> None:
    bins, loads = drawn
    units = normalised(loads, bins)
    worst = int(units[partition_of_loads(units, bins)].sum(axis=1).max())
    order = np.argsort(-units.max(axis=1), kind="stable")
    assert worst <= max(int(units[order[index::bins]].sum(axis=0).max()) for index in range(bins)) * 3 // 2
    assert sorted(dealt(loads, bins, over).ravel().tolist()) == list(range(len(loads)))


def test_a_load_that_is_nowhere_and_one_beyond_53_bits() -> None:
    loads = np.array([[5, 0], [4, 0], [3, 0], [2, 0]], np.int64)
    assert normalised(loads, 2)[:, 1].tolist() == [0, 0, 0, 0]
    assert loads[dealt(loads, 2, Over.RANKS)[:, 0], 0].sum(axis=1).tolist() == [7, 7]
    nothing = np.zeros((4, 2), np.int64)
    assert sorted(partition_of_loads(normalised(nothing, 2), 2).ravel().tolist()) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match=r"divide the cost by \d+|divide them by \d+"):
        planned(cost=CostModel(1 << 46, 0), loads=("tokens", "pixels"))


def test_rows_of_two_even_ranks_meet_the_bounds_of_the_issue() -> None:
    draw = np.random.default_rng(1)
    for rows, bound in ((8, 1.015), (4, 1.05)):
        images = np.minimum(np.exp(draw.normal(7, 0.8, (64 * rows, 6))), 8192).astype(np.int64).sum(axis=1)
        documents = np.exp(draw.normal(6.5, 1.1, (64 * rows, 8))) ** 2
        backbone = 6 * 4096 * 8192 + documents.sum(axis=1).clip(0, 8192**2).astype(np.int64)
        loads = np.stack([backbone, images], axis=1)
        held = loads[dealt(loads, 64, Over.MICRO_BATCHES)[:, 0]].sum(axis=1)
        assert (held.max(axis=0) / held.mean(axis=0) <= bound).all()


def test_one_load_is_dealt_as_before() -> None:
    """`deal` of a vector is not touched by what loads are sorted by."""
    costs = np.array([9, 7, 6, 5, 4, 4, 3, 1], np.int64)
    for over in Over:
        assert sorted(dealt(costs, 2, over, 2).ravel().tolist()) == list(range(8))
    assert dealt(costs, 2, Over.RANKS, 2).tolist() == [[[0, 3], [5, 7]], [[1, 2], [4, 6]]]


def test_a_rule_of_one_source_has_no_rows_where_its_pieces_have_none() -> None:
    chosen = rules(
        {"s": 1}, lengths={0: 8}, ranks=1, micro_batch_tokens=8, columns=("pixels",), sources={"s": SourceRule("i")},
    )  # fmt: skip
    planner = Planner(chosen)
    plan = planner.next(planner.begin(), {"s": Ahead([piece([8], None)], ended=True)})
    assert isinstance(plan, StepPlan)
    assert plan.spans.shape == (1, len(Span) + 1)
    assert plan.spans[0, -1] == 0


def plan_of(*, columns: dict[str, Column], images: Images | None = None, **more) -> Plan:
    output = Output(mesh="dp=2", sequence_length=64, columns=columns)
    sources = {"pictures": Parquet("x", transform="json:loads", images=images), "words": Text("y")}
    return Plan(output=output, sources=sources, **more)


PATCHES = {"pixels": Column(dtype="uint8", shape=[588]), "grid": Column(dtype="int32", shape=[3])}


def compiled(plan: Plan) -> CompiledPlan:
    return compile_plan(plan, listings={}, tokenizer_digest="t")


def identities(plan: Plan) -> dict[str, str]:
    return {name: rule.identity for name, rule in compiled(plan).rules.sources.items()}


def test_a_kept_plan_is_read_again_and_one_without_columns_has_the_text_of_before() -> None:
    images = Images(fields=["jpg", "png"], merge=1)
    plan = plan_of(
        columns=PATCHES, images=images, cost=PlanCost(hidden_size=8, columns={"pixels": 5}),
        balance=Balance(loads=["tokens", "pixels"]),
    )  # fmt: skip
    assert plan_digest(plan_of_text(plan_text(plan))) == plan_digest(plan)
    found = settings_of(plan)
    assert found["output"]["columns"] == {
        "grid": {"dtype": "int32", "shape": [3], "file": "rank"},
        "pixels": {"dtype": "uint8", "shape": [588], "file": "rank"},
    }
    assert found["cost"] == {"linear": 48, "quadratic": 1, "columns": {"pixels": 5}}
    assert found["balance"]["loads"] == ["tokens", "pixels"]
    assert found["sources"]["pictures"]["images"]["fields"] == ["jpg", "png"]
    plain = settings_of(plan_of(columns={}))
    assert "columns" not in plain["output"]
    assert plain["balance"].keys() == {"method", "over"}
    assert plain["cost"].keys() == {"linear", "quadratic"}
    assert "images" not in plain["sources"]["pictures"]
    with_file = {**PATCHES, "pixels": Column(dtype="uint8", shape=[588], file="own")}
    assert settings_of(plan_of(columns=with_file))["output"]["columns"]["pixels"]["file"] == "own"
    assert grid_of(plan_of(columns=with_file)).files == ("", "pixels")
    assert grid_of(plan).files == ("",)


def test_only_sources_that_may_give_columns_are_others_with_them() -> None:
    plain, declared = identities(plan_of(columns={})), identities(plan_of(columns=PATCHES))
    assert plain["words"] == declared["words"]
    own = {name: Column(dtype=one.dtype, shape=one.shape, file="own") for name, one in PATCHES.items()}
    other = {**PATCHES, "grid": Column(dtype="int64", shape=[3])}
    images = (None, Images(fields="jpg"), Images(fields="jpg", patch=16))
    plans = [plan_of(columns={}), plan_of(columns=other), *(plan_of(columns=PATCHES, images=one) for one in images)]
    assert len({identities(plan)["pictures"] for plan in plans}) == len(plans)
    assert identities(plan_of(columns=own)) == declared, "where a column is written is policy"


def test_workers_load_what_a_plan_needs_before_their_first_task() -> None:
    assert modules_of(compiled(plan_of(columns={})).transforms.values()) == ["json"]
    modules = modules_of(compiled(plan_of(columns=PATCHES, images=Images(fields="jpg"))).transforms.values())
    program = (
        "import sys; from stepfs_producer.engine.worker import preload;"
        f"preload('.', {[*modules, 'no.such.module']});"
        "print(*sorted({'PIL.JpegImagePlugin', 'PIL.PngImagePlugin', 'PIL.Image'} & set(sys.modules)))"
    )
    done = ran([sys.executable, "-c", program], check=True)
    assert done.stdout.split() == ["PIL.Image", "PIL.JpegImagePlugin", "PIL.PngImagePlugin"]
