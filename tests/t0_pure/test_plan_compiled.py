"""A plan file in the terms of the planner, the loaders and the constructors."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from stepfs.errors import UsageError
from stepfs_producer.payloads.step import PayloadSpec
from stepfs_producer.plan.balance import Method
from stepfs_producer.plan.draw import ONE
from stepfs_producer.plan.file.digest import normalised, plan_digest
from stepfs_producer.plan.file.schema import Jsonl, Megatron, Output, Parquet, Plan, Source, Text, parsed_plan
from stepfs_producer.plan.file.yaml_file import read_plan
from stepfs_producer.plan.rules import Exhausted, Packing
from stepfs_producer.plan.samples import Long, SkipBudget
from stepfs_producer.run.prepare import CompiledPlan, compile_plan, payload_spec
from stepfs_producer.sources.record import SourceSpec
from stepfs_producer.transforms.documents import TokenizerSpec

PLANS = Path(__file__).parent / "plans"
OUTPUT = Output(mesh="dp=2", sequence_length=64)


def file(name: str, **more: object) -> CompiledPlan:
    plan = read_plan((PLANS / name).read_bytes(), name).plan
    return compile_plan(plan, listings=dict.fromkeys(plan.sources, "l"), tokenizer_digest="t", **more)


def of_sources(**sources: object) -> CompiledPlan:
    return compile_plan(Plan(output=OUTPUT, sources=sources), listings={}, tokenizer_digest="t")


def test_the_first_plan_has_the_defaults_of_a_first_user():
    first = file("first.yaml")
    rules = first.rules
    assert (rules.ranks, rules.micro_batches, rules.micro_batch_tokens) == (8, 1, 4096)
    assert list(rules.sources) == ["code", "prose"]
    assert rules.mix.shares(0) == (1288490189, ONE - 1288490189), "the larger remainder is rounded up"
    assert (rules.cost.linear, rules.cost.quadratic) == (24576, 1)
    assert (rules.packing, rules.method, rules.exhausted) == (Packing.BEST_FIT, Method.AUTO, Exhausted.ALL)
    assert (rules.steps_max, rules.tokens_max, rules.pad_last) == (None, None, False)
    assert rules.sources["code"].long is Long.SPLIT
    assert rules.sources["code"].skips is None
    assert rules.sources["code"].listing == "l"
    first_plan = read_plan((PLANS / "first.yaml").read_bytes(), "first.yaml").plan
    assert payload_spec(first_plan, padding=1, vocabulary=9) == PayloadSpec(".safetensors", True, 1, 9)
    assert first.transforms["code"].tokenizer == TokenizerSpec("tokenizer.json", "</s>")
    assert first.specs["code"] == SourceSpec("code", "parquet", ("s3://corpora/code/*.parquet",), text_field="content")


def test_the_second_plan_reaches_every_room():
    second = file("second.yaml")
    rules = second.rules
    assert (rules.ranks, rules.micro_batches, rules.micro_batch_tokens) == (4, 4, 16384)
    assert [rules.stages.sequence_length(step) for step in (0, 7999, 8000)] == [4096, 4096, 16384]
    chats, code, prose = rules.mix.shares(5000)
    assert [round(share * 1000 / ONE) for share in (chats, code, prose)] == [150, 275, 575]
    assert rules.mix.shares(10**6) == rules.mix.shares(10**4)
    assert rules.steps_max == 200_000
    assert rules.sources["prose"].skips == SkipBudget(Fraction(1, 1000), 100)
    assert second.specs["prose"].holdout == Fraction(1, 1000)
    assert second.specs["chats"].whole_records
    assert second.specs["chats"].epochs == Fraction(5, 2)
    assert second.transforms["chats"].call == "my_sft:render"
    assert second.transforms["code"].call is None
    assert (second.specs["code"].endpoint_url, second.specs["code"].profile) == (
        "https://s3.example",
        "corpora",
    )
    assert {spec.seed for spec in second.specs.values()} == {20260701}


def test_relative_names_are_below_the_directory_of_the_plan():
    plan = Plan(
        output=OUTPUT,
        tokenizer={"kind": "huggingface", "file": "t.json"},
        sources={"a": Text("x", "/abs", "s3://b/k", "sub/*.txt")},
    )
    there = compile_plan(plan, listings={}, tokenizer_digest="", directory="/plans")
    assert there.specs["a"].files == ("/plans/x", "/abs", "s3://b/k", "/plans/sub/*.txt")
    assert there.transforms["a"].tokenizer.file == "/plans/t.json"
    assert there.rules == dataclasses.replace(
        compile_plan(plan, listings={}, tokenizer_digest="").rules,
        mix=there.rules.mix,
        stages=there.rules.stages,
    )


def test_a_tilde_is_the_home_directory_wherever_a_plan_names_a_file(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    sources = {"a": Text("~/x", "~nobody-of-that-name/y", "./~")}
    plan = Plan(output=OUTPUT, tokenizer={"kind": "huggingface", "file": "~/t.json"}, sources=sources)
    for directory, elsewhere in (("/plans", "/plans/"), ("", "")):
        found = compile_plan(plan, listings={}, tokenizer_digest="", directory=directory)
        names = ("~nobody-of-that-name/y", "~" if directory else "./~")
        assert found.specs["a"].files == ("/home/me/x", *(f"{elsewhere}{name}" for name in names))
        assert found.transforms["a"].tokenizer.file == "/home/me/t.json"


def test_every_format_has_its_settings():
    specs = of_sources(
        a=Parquet("x", tokens_field="input_ids", labels_field="labels"),
        b=Megatron("x"),
        c=Source("x", format="m:C", text_field="body", options={"k": "1_000"}, version="3", transform="m:f"),
        d=Jsonl("x", shuffle="none"),
        e=Text("x", shuffle={"block": "1MiB"}, transform="m:f"),
    ).specs
    assert (specs["a"].tokens_field, specs["a"].labels_field, specs["a"].mask_field) == (
        "input_ids",
        "labels",
        None,
    )
    assert specs["b"].format == "megatron"
    assert (specs["c"].format, specs["c"].options, specs["c"].version) == ("m:C", {"k": "1_000"}, "3")
    assert (specs["c"].text_field, specs["c"].whole_records) == ("body", True)
    assert not specs["d"].shuffle
    assert (specs["e"].block_bytes, specs["e"].whole_records) == (1 << 20, False)


def test_holding_out_reaches_sources_and_identities():
    taken, held = file("second.yaml"), file("second.yaml", held_out=True)
    assert {spec.held_out for spec in held.specs.values()} == {True}
    assert taken.rules.sources["prose"].identity != held.rules.sources["prose"].identity


def test_a_cost_function_is_found_by_name():
    plan = Plan(output=OUTPUT, sources={"a": Text("x")}, cost={"call": "my_plan_code:flops"})
    cost = compile_plan(plan, listings={}, tokenizer_digest="").rules.cost
    assert cost.of_samples({"tokens": np.array([2, 5])}).tolist() == [6, 15]


def test_a_cost_function_that_is_not_there_is_a_usage_error():
    plan = Plan(output=OUTPUT, sources={"a": Text("x")}, cost={"call": "my_plan_code:flop"})
    with pytest.raises(UsageError, match=r"my_plan_code:flop: .*did you mean 'flops'"):
        compile_plan(plan, listings={}, tokenizer_digest="t")


def test_a_plan_that_holds_nothing_out_has_no_other_side() -> None:
    plan = Plan(output=OUTPUT, sources={"a": Text("a.txt")})
    with pytest.raises(UsageError, match="no source of the plan holds records out"):
        compile_plan(plan, listings={}, tokenizer_digest="t", held_out=True)


def test_sizes_and_a_temperature_become_weights() -> None:
    settings = {
        "output": {"mesh": "dp=1", "sequence_length": 8},
        "sources": {name: {"format": "text", "files": name} for name in ("a", "b", "c")},
        "mix": {"temperature": 0.5, "sizes": {"a": 900, "b": 100, "c": 0}},
    }
    plan = parsed_plan(settings)
    assert normalised(plan)["mix"] == [{"from": 0, "weights": {"a": "0.75", "b": "0.25", "c": "0"}}]
    assert plan_digest(plan) == plan_digest(parsed_plan(settings | {"mix": {"a": 0.75, "b": 0.25, "c": 0}}))
    assert normalised(parsed_plan(settings | {"mix": {"sizes": {"a": 9, "b": 1, "c": 2}}}))["mix"][0]["weights"] == {
        "a": "0.75", "b": "0.083333", "c": "0.166667",
    }  # fmt: skip
