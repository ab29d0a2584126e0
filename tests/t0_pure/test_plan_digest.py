"""What a plan is: one text for all ways to write it, identities that policy does not touch, and what changed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import CorruptError
from stepfs_producer.plan.file.digest import differences, normalised, plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.file.schema import (
    Balance,
    Cost,
    Defaults,
    Jsonl,
    Megatron,
    Mix,
    OnError,
    Output,
    Pack,
    Parquet,
    Plan,
    Shuffle,
    Source,
    Stage,
    Text,
    Tokenizer,
    Until,
)
from stepfs_producer.plan.file.yaml_file import read_plan
from stepfs_producer.run.prepare import compile_plan

PLANS = sorted((Path(__file__).parent / "plans").glob("*.yaml"))
SHORT = Plan(
    output=Output(mesh="dp=2", sequence_length=64),
    sources={"b": Text("y"), "a": Parquet("x")},
)


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
    {"files": st.lists(words, min_size=1, max_size=3)},
    optional={"version": words, "transform": st.just("m.n:f")},
)
sources = st.one_of(
    st.builds(lambda one, two: Jsonl(**one, **two), settings, beside),
    st.builds(lambda one, two: Text(**one, **two), settings, beside),
    st.builds(lambda one, two: Megatron(**one, **two), settings, beside),
    st.builds(lambda one, two, field: Parquet(**one, **two, text_field=field), settings, beside, words),
    st.builds(
        lambda one, two, field: Parquet(**one, **two, tokens_field=field, mask_field="m"),
        settings,
        beside,
        words,
    ),
    st.builds(
        lambda one, two, value: Source(**one, **two, format="m:C", options={"k": value}),
        settings,
        beside,
        words,
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
        sources={
            "a": Parquet("x", shuffle={"block": "8MiB"}),
            "b": Text("y", epochs="none", on_error="stop"),
        },
        mix=[Mix(from_=0, weights={"a": "1.0", "b": 1})],
        cost=Cost(hidden_size=4096),
        until="none",
    )
    assert plan_text(long) == plan_text(SHORT)
    assert plan_digest(long) == plan_digest(SHORT)
    assert len(plan_digest(SHORT)) == 32


def test_the_digest_of_a_plan_is_the_same_for_ever():
    assert plan_digest(SHORT) == "261a1eab08536abb2e8aa2775027933c"
    assert identities(SHORT, "t") == {"a": "9bbc9545f983cce4", "b": "57e4a92e826d8bc9"}


def test_a_damaged_kept_text_is_refused():
    with pytest.raises(CorruptError, match="kept plan"):
        plan_of_text("{}")
    with pytest.raises(CorruptError, match="kept plan"):
        plan_of_text("[" * 100_000)


def changed(**update: object) -> Plan:
    return Plan.model_validate(normalised(SHORT) | update)


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
    assert line.endswith(", files: [y], version: '', format: text, records: lines} → none")


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
