"""A plan as it is compiled, kept and told from others: its digest, its identities, and what each setting becomes."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from declared import tokenizer_spec
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError, UsageError
from stepfs_producer.payloads.step import ColumnSpec, PayloadSpec
from stepfs_producer.plan.balance import Method
from stepfs_producer.plan.file.digest import differences, normalised, plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.file.yaml_file import read_plan
from stepfs_producer.plan.mix import ONE
from stepfs_producer.plan.model import Plan, parsed_plan
from stepfs_producer.plan.part import Part, _keys, keys_of
from stepfs_producer.plan.parts import Balance, Cost, Mix, Output, Pack, Stage, Until
from stepfs_producer.plan.rules import Exhausted, Packing
from stepfs_producer.plan.sources import (
    Chat,
    Column,
    Defaults,
    Jsonl,
    Long,
    Megatron,
    OnError,
    Parquet,
    Shuffle,
    SkipBudget,
    Source,
    Table,
    Text,
    Tokenizer,
)
from stepfs_producer.run.identity import _identity_of
from stepfs_producer.run.prepare import CompiledPlan, compile_plan, payload_spec
from stepfs_producer.sources.record import SourceSpec
from stepfs_producer.transforms.documents import ChatSpec, TokenizerSpec

PLANS = sorted((Path(__file__).parent / "plans").glob("*.yaml"))
SHORT = Plan(output=Output(mesh="dp=2", sequence_length=64), sources={"b": Text("y"), "a": Parquet("x")})


def identities(plan: Plan, digest: str, *, held_out: bool = False) -> dict[str, str]:
    rules = compile_plan(plan, listings={}, tokenizer_digest=digest, held_out=held_out).rules
    return {name: rule.identity for name, rule in rules.sources.items()}


wholes = st.integers(1, 1 << 20)
decimals = st.decimals("0.001", 1000, places=3).map(lambda value: Fraction(str(value)))
shares = st.integers(0, 999_999).map(lambda value: Fraction(value, 10**6))
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
settings = st.fixed_dictionaries(
    {},
    optional={
        "shuffle": st.one_of(st.none(), st.builds(Shuffle, block=st.integers(1 << 16, 1 << 30))),
        "long": st.sampled_from(["split", "truncate", "drop"]),
        "epochs": st.one_of(st.none(), decimals),
        "on_error": st.one_of(
            st.just(OnError()), st.builds(OnError, do=st.just("skip"), at_most=shares, in_a_row=wholes)
        ),
        "holdout": shares,
        "endpoint_url": words,
        "profile": words,
    },
)
beside = st.fixed_dictionaries(
    {"files": st.lists(words, min_size=1, max_size=3)}, optional={"version": words, "transform": st.just("m.n:f")}
)
sources = st.one_of(
    st.builds(lambda one, two: Jsonl(**one, **two), settings, beside),
    st.builds(lambda one, two: Text(**one, **two), settings, beside),
    st.builds(lambda one, two: Megatron(**one, **two), settings, beside),
    st.builds(lambda one, two, field: Parquet(**one, **two, text_field=field), settings, beside, words),
    st.builds(
        lambda one, two, field: Parquet(**one, **two, tokens_field=field, mask_field="m"), settings, beside, words
    ),
    st.builds(
        lambda one, two, value: Source(**one, **two, format="m:C", options={"k": value}), settings, beside, words
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    declared = draw(st.dictionaries(words.filter(str.isprintable), sources, min_size=1, max_size=4))
    weights = st.fixed_dictionaries(dict.fromkeys(declared, decimals))
    ramps = draw(st.booleans())
    length = draw(st.integers(1, 4096))
    return Plan(
        seed=draw(st.integers(0, 2**64 - 1)),
        output=Output(
            ext=draw(st.sampled_from([".pt", ".npy", ".safetensors"])),
            mesh=draw(st.sampled_from(["dp=1", "pp=2, dp_replicate=3, dp_shard=2, cp=1"])),
            micro_batches=draw(st.integers(1, 8)),
            labels=draw(st.sampled_from(["shifted", "same"])),
            **({} if ramps else {"sequence_length": length}),
        ),
        stages=[Stage(sequence_length=length), Stage(from_=7, sequence_length=length * 2)] if ramps else (),
        tokenizer=draw(st.sampled_from([Tokenizer(), Tokenizer(kind="huggingface", file="t.json", bos="none")])),
        defaults=draw(settings.map(lambda given: Defaults(**given))),
        sources=declared,
        mix=()
        if draw(st.booleans())
        else [Mix(weights=draw(weights)), *([Mix(ramp_to=9, weights=draw(weights))] if ramps else [])],
        pack=draw(st.sampled_from([Pack(), Pack(method="concat")])),
        cost=draw(st.sampled_from([Cost(hidden_size=3), Cost(quadratic=2), Cost(call="m:f"), Cost()])),
        balance=draw(st.sampled_from([Balance(), Balance(method="none", over="ranks")])),
        until=draw(st.sampled_from([Until(), Until(steps=3, tokens=4, last="pad")])),
    )


@given(plans())
def test_the_kept_text_is_the_plan(plan):
    again = plan_of_text(plan_text(plan))
    assert normalised(again) == normalised(plan)
    assert plan_of_text(plan_text(again)) == again


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_file_and_its_kept_text_have_one_digest(path):
    plan = read_plan(path.read_bytes(), "p.yaml").plan
    assert plan_digest(plan_of_text(plan_text(plan))) == plan_digest(plan)
    assert read_plan(plan_text(plan).encode(), "p.yaml").plan == plan_of_text(plan_text(plan))


def test_what_is_given_and_what_is_default_are_one_plan():
    long = Plan(
        version=1,
        seed=0,
        output=Output(mesh="dp=2", ext=".safetensors", micro_batches=1, micro_batch_tokens=64),
        stages=[Stage(from_=0, sequence_length=64)],
        tokenizer=Tokenizer(kind="bytes"),
        sources={"a": Parquet("x", shuffle={"block": "8MiB"}), "b": Text("y", epochs="none", on_error="stop")},
        mix=[Mix(from_=0, weights={"a": "1.0", "b": 1})],
        cost=Cost(hidden_size=4096),
        until="none",
    )
    assert plan_text(long) == plan_text(SHORT)
    assert plan_digest(long) == plan_digest(SHORT)
    assert len(plan_digest(SHORT)) == 32


def test_the_digest_of_a_plan_is_the_same_for_ever():
    assert plan_digest(SHORT) == "1fe4ded061d1f52cc471554742054930"
    assert identities(SHORT, "t") == {"a": "e2d7c29c354bfcdc", "b": "cc4dd7593e42010f"}


def test_a_damaged_kept_text_is_refused():
    with pytest.raises(CorruptError, match="kept plan"):
        plan_of_text("{}")
    with pytest.raises(CorruptError, match="kept plan"):
        plan_of_text("[" * 100_000)


def changed(**update: object) -> Plan:
    return Plan.read(normalised(SHORT) | update)


def with_source(**update: object) -> Plan:
    declared = normalised(SHORT)["sources"]
    return changed(sources=declared | {"a": declared["a"] | update})


@pytest.mark.parametrize(
    "plan", [
        changed(seed=1),
        changed(tokenizer={"kind": "bytes", "eos": "none"}), with_source(shuffle="none"),
        with_source(shuffle={"block": "1MiB"}), with_source(holdout="1%"), with_source(transform="m:f"),
        with_source(version="2"), with_source(text_field="content"),
        changed(sources=normalised(SHORT)["sources"] | {"a": {"format": "jsonl", "files": "x"}}),
    ],
)  # fmt: skip
def test_an_identity_changes_with_what_makes_the_sequence(plan):
    assert identities(plan, "t")["a"] != identities(SHORT, "t")["a"]


def test_an_identity_changes_with_the_tokenizer_and_the_side_of_the_holdout():
    assert identities(SHORT, "other")["a"] != identities(SHORT, "t")["a"]
    held = with_source(holdout="1%")
    assert identities(held, "t", held_out=True)["a"] != identities(held, "t")["a"]


@pytest.mark.parametrize(
    "plan", [
        with_source(files="elsewhere"), with_source(epochs=2), with_source(long="drop"), with_source(on_error="skip"),
        with_source(endpoint_url="http://x", profile="p"), changed(mix={"a": 1, "b": 3}),
        changed(output={"mesh": "dp=4", "ext": ".npy"}),
        changed(tokenizer={"kind": "bytes", "pad": "none"}),
        changed(cost={"linear": 1}, balance="none", pack="concat", until={"steps": 5}),
    ],
)  # fmt: skip
def test_an_identity_does_not_change_with_policy(plan):
    assert identities(plan, "t") == identities(SHORT, "t")
    assert plan_digest(plan) != plan_digest(SHORT)


def test_what_changed_is_said_in_lines():
    after = changed(mix=[{"weights": {"a": "35", "b": 1}}, {"ramp_to": 10, "weights": {"a": 1}}], until={"steps": 5})
    assert differences(normalised(SHORT), normalised(after)) == [
        "mix[0].weights.a: 1 → 35",
        "mix[1]: none → {ramp_to: 10, weights: {a: 1}}",
        "until.steps: none → 5",
    ]
    assert differences(normalised(after), normalised(after)) == []
    gone = json.loads(json.dumps(normalised(SHORT)))
    del gone["sources"]["b"]
    (line,) = differences(normalised(SHORT), gone)
    assert line.startswith("sources.b: {shuffle: {block: 8388608}, ")
    assert line.endswith(", files: [y], version: '', format: text, records: files} → none")


def test_where_files_lie_is_no_change():
    elsewhere = {"format": "text", "files": ["/mnt/y", "/mnt/z"], "endpoint_url": "http://s3", "profile": "p"}
    moved = changed(sources=normalised(SHORT)["sources"] | {"b": elsewhere})
    assert plan_digest(moved) != plan_digest(SHORT)
    assert differences(normalised(SHORT), normalised(moved)) == []


def test_a_kept_plan_says_nothing_to_the_terminal():
    hostile = changed(
        sources=normalised(SHORT)["sources"] | {"b": {"format": "text", "files": "y", "version": "1\n\x1b[31m"}}
    )
    (line,) = differences(normalised(SHORT), normalised(hostile))
    assert line == "sources.b.version: '' → 1??[31m"


FILES = Path(__file__).parent / "plans"
OUTPUT = Output(mesh="dp=2", sequence_length=64)


def file(name: str, **more: object) -> CompiledPlan:
    plan = read_plan((FILES / name).read_bytes(), name).plan
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
    first_plan = read_plan((FILES / "first.yaml").read_bytes(), "first.yaml").plan
    assert payload_spec(first_plan, padding=1, vocabulary=9) == PayloadSpec(".safetensors", True, 1, 9)
    assert first.transforms["code"].tokenizer == tokenizer_spec("tokenizer.json", eos="</s>")
    assert first.specs["code"] == SourceSpec("code", Parquet("s3://corpora/code/*.parquet", text_field="content"))


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
    assert second.specs["prose"].source.holdout == Fraction(1, 1000)
    assert second.specs["chats"].source.takes_whole
    assert second.specs["chats"].source.epochs == Fraction(5, 2)
    assert second.transforms["chats"].source.transform == "my_sft:render"
    assert second.transforms["code"].source.transform is None
    assert (second.specs["code"].source.endpoint_url, second.specs["code"].source.profile) == (
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
    assert there.specs["a"].source.files == ("/plans/x", "/abs", "s3://b/k", "/plans/sub/*.txt")
    assert there.transforms["a"].tokenizer.file == "/plans/t.json"
    assert there.rules == dataclasses.replace(
        compile_plan(plan, listings={}, tokenizer_digest="").rules, mix=there.rules.mix, stages=there.rules.stages
    )


def test_a_tilde_is_the_home_directory_wherever_a_plan_names_a_file(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    sources = {"a": Text("~/x", "~nobody-of-that-name/y", "./~")}
    plan = Plan(output=OUTPUT, tokenizer={"kind": "huggingface", "file": "~/t.json"}, sources=sources)
    for directory, elsewhere in (("/plans", "/plans/"), ("", "")):
        found = compile_plan(plan, listings={}, tokenizer_digest="", directory=directory)
        names = ("~nobody-of-that-name/y", "~" if directory else "./~")
        assert found.specs["a"].source.files == ("/home/me/x", *(f"{elsewhere}{name}" for name in names))
        assert found.transforms["a"].tokenizer.file == "/home/me/t.json"


def test_every_format_has_its_settings():
    found = of_sources(
        a=Parquet("x", tokens_field="input_ids", labels_field="labels"),
        b=Megatron("x"),
        c=Source("x", format="m:C", text_field="body", options={"k": "1_000"}, version="3", transform="m:f"),
        d=Jsonl("x", shuffle="none"),
        e=Text("x", shuffle={"block": "1MiB"}, transform="m:f"),
    )
    specs: dict[str, Any] = {name: spec.source for name, spec in found.specs.items()}
    assert specs["a"].id_fields == ("input_ids", None, "labels")
    assert specs["b"].format == "megatron"
    assert (specs["c"].format, specs["c"].options, specs["c"].version) == ("m:C", {"k": "1_000"}, "3")
    assert (specs["c"].text_field, specs["c"].takes_whole) == ("body", True)
    assert not specs["d"].shuffle
    assert (found.specs["e"].block_bytes, specs["e"].takes_whole) == (1 << 20, False)


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


@pytest.mark.parametrize("flattened", [{"temperature": 2}, {"alpha": 0.5}])
def test_sizes_and_a_temperature_become_weights(flattened: dict[str, float]) -> None:
    """In proportion to n ** (1 / T), as in T5 (arXiv:1910.10683, section 3.5.2)."""
    settings = {
        "output": {"mesh": "dp=1", "sequence_length": 8},
        "sources": {name: {"format": "text", "files": name} for name in ("a", "b", "c")},
        "mix": {**flattened, "sizes": {"a": 900, "b": 100, "c": 0}},
    }
    plan = parsed_plan(settings)
    assert normalised(plan)["mix"] == [{"from": 0, "weights": {"a": "0.75", "b": "0.25", "c": "0"}}]
    assert plan_digest(plan) == plan_digest(parsed_plan(settings | {"mix": {"a": 0.75, "b": 0.25, "c": 0}}))
    assert normalised(parsed_plan(settings | {"mix": {"sizes": {"a": 9, "b": 1, "c": 2}}}))["mix"][0]["weights"] == {
        "a": "0.75", "b": "0.083333", "c": "0.166667",
    }  # fmt: skip


def test_budgets_of_tokens_become_weights_and_the_end() -> None:
    settings = {
        "output": {"mesh": "dp=1", "sequence_length": 8},
        "sources": {name: {"format": "text", "files": name} for name in ("a", "b")},
        "mix": {"tokens": {"a": 30_000_000_000, "b": 10_000_000_000}},
    }
    plan = parsed_plan(settings)
    assert normalised(plan)["mix"] == [{"from": 0, "weights": {"a": "0.3", "b": "0.1"}}]
    assert normalised(plan)["until"]["tokens"] == 40_000_000_000
    assert plan_digest(plan) == plan_digest(plan_of_text(plan_text(plan)))
    rules = compile_plan(plan, listings={}, tokenizer_digest="t").rules
    assert rules.tokens_max == 40_000_000_000
    assert rules.mix.shares(5) == (3 << 30, 1 << 30)
    sooner = parsed_plan(settings | {"until": {"tokens": 5}})
    assert compile_plan(sooner, listings={}, tokenizer_digest="t").rules.tokens_max == 5
    several = [{"tokens": {"a": 1, "b": 1}}, {"from": 5, "weights": {"a": 1, "b": 0}}]
    with pytest.raises(UsageError, match="budgets hold for the whole plan; give weights where a mix changes"):
        parsed_plan(settings | {"mix": several})


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (SourceSpec, (Defaults, Jsonl, Text, Parquet, Table, Megatron, Source)),
        (TokenizerSpec, (Tokenizer,)),
        (ChatSpec, (Chat, Tokenizer)),
        (ColumnSpec, (Column,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_key_is_declared_once(found: Any, parts: tuple[type[Part], ...]) -> None:
    """What workers get is the parts themselves, and what a run has found for them."""
    keys = {one.name for part in parts for one in keys_of(part)}
    assert not keys & set(getattr(found, "_fields", None) or (one.name for one in dataclasses.fields(found)))


def test_a_key_that_came_later_says_nothing_while_it_is_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run goes on under the version that brought it, and under the one before."""

    def plan(**settings: str) -> Plan:
        return Plan(output=SHORT.output, sources={"a": Jsonl("x", **settings)})  # type: ignore[arg-type]

    usual, changed = plan(), plan(text_field="body")
    with_key, digest, identity = normalised(usual), plan_digest(changed), _identity_of(changed.sources["a"])
    keys = tuple(key._replace(later=key.name == "text_field") for key in keys_of(Jsonl))
    monkeypatch.setitem(_keys, Jsonl, keys)
    del with_key["sources"]["a"]["text_field"]
    assert normalised(usual) == with_key
    assert plan_text(plan_of_text(plan_text(usual))) == plan_text(usual)
    assert (plan_digest(changed), _identity_of(changed.sources["a"])) == (digest, identity)
    assert "text_field" not in _identity_of(usual.sources["a"])
