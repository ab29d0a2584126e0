"""Plan files: what is accepted and what it means, and every mistake with its line and column."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from stepfs_producer.plan.file.schema import Jsonl, Mix, Output, Parquet, Plan, Shuffle
from stepfs_producer.plan.file.values import PlanError
from stepfs_producer.plan.file.yaml_file import read_plan
from stepfs_producer.plan.samples import Long, SkipBudget

PLANS = Path(__file__).parent / "plans"
FIRST = (PLANS / "first.yaml").read_text()
OUTPUT = 'output: {mesh: "dp=8", sequence_length: 4096}\n'
SOURCES = "sources: {a: {format: jsonl, files: x}}\n"
COMPLETE = OUTPUT + SOURCES


def read(text: str) -> Plan:
    return read_plan(text.encode(), "plan.yaml").plan


def refusal(text: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(text)
    assert caught.value.exit_code == 2
    lines = list(caught.value.lines)
    head = [] if len(lines) == 1 else [f"the plan has {len(lines)} mistakes:"]
    assert str(caught.value).splitlines() == head + lines
    return lines


def test_the_first_plan_of_the_design_is_a_whole_plan():
    plan = read(FIRST)
    assert plan.output.mesh.data_ranks == 8
    assert plan.output.ext == ".safetensors"
    assert plan.tokenizer.eos == "</s>"
    assert plan.sources["code"] == Parquet("s3://corpora/code/*.parquet", text_field="content")
    assert plan.sources["prose"] == Jsonl("/data/web/")
    assert plan.mix == (Mix(weights={"code": 30, "prose": 70}),)


def test_the_second_plan_of_the_design_uses_nearly_all():
    plan = read((PLANS / "second.yaml").read_text())
    assert (plan.output.mesh.data_ranks, plan.output.mesh.world) == (4, 16)
    assert [(stage.from_, stage.sequence_length) for stage in plan.stages] == [(0, 4096), (8000, 16384)]
    prose, chats = plan.sources["prose"], plan.sources["chats"]
    assert prose.on_error.budget == SkipBudget(Fraction(1, 1000), 100)
    assert prose.holdout == Fraction(1, 1000)
    assert prose.files == ("s3://corpora/web/", "/data/books")
    assert (chats.epochs, chats.transform) == (Fraction(5, 2), "my_sft:render")
    assert plan.mix[1].ramp_to == 10000
    assert plan.mix[1].weights["code"] == 35
    assert plan.seed == 20260701
    assert plan.until.steps == 200000


def test_a_plan_of_bytes_needs_no_file():
    assert read((PLANS / "bytes.yaml").read_text()).tokenizer.kind == "bytes"


def test_the_same_plan_from_python_is_equal():
    plan = Plan(
        output=Output(ext=".safetensors", mesh="dp=8", sequence_length=4096),
        tokenizer={"kind": "huggingface", "file": "tokenizer.json", "eos": "</s>"},
        sources={
            "code": Parquet("s3://corpora/code/*.parquet", text_field="content"),
            "prose": Jsonl("/data/web/"),
        },
        mix=[Mix(weights={"code": 30, "prose": 70})],
    )
    assert plan == read(FIRST)


MINIMAL = 'output: {{mesh: "dp=2", sequence_length: 64}}\nsources:\n  a: {{format: jsonl, files: x{0}}}\n'


@pytest.mark.parametrize(
    ("setting", "name", "value"), [
        ("epochs: 2.5", "epochs", Fraction(5, 2)), ("epochs: none", "epochs", None),
        ("epochs: 1_000", "epochs", Fraction(1000)),
        ("holdout: 0.1%", "holdout", Fraction(1, 1000)),
        ("holdout: 0.001", "holdout", Fraction(1, 1000)),
        ("holdout: 0.0000000000000001%", "holdout", Fraction(1, 10**18)), ("shuffle: none", "shuffle", None),
        ("shuffle: {block: 1MiB}", "shuffle", Shuffle(block=1 << 20)), ("long: drop", "long", Long.DROP),
        ("text_field: no", "text_field", "no"),
        ("text_field: 1_000", "text_field", "1_000"), ("text_field: ~", "text_field", "~"),
        ("text_field: 2026-07-01", "text_field", "2026-07-01"), ("version: 1.10", "version", "1.10"),
    ],
)  # fmt: skip
def test_scalars_are_what_they_look_like(setting, name, value):
    found = getattr(read(MINIMAL.format(f", {setting}")).sources["a"], name)
    assert found == value
    assert type(found) is type(value)


def test_sources_may_be_called_as_yaml_calls_booleans_and_numbers():
    names = ["no", "on", "1_000", "null", "~", "weights", "0x10", "1e3", "from"]
    sources = "\n".join(f"  {name}: {{format: text, files: x}}" for name in names)
    mix = ", ".join(f"{name}: 1" for name in names)
    plan = read(f"output: {{mesh: dp=1, sequence_length: 8}}\nsources:\n{sources}\nmix: [{{weights: {{{mix}}}}}]\n")
    assert list(plan.sources) == names
    assert list(plan.mix[0].weights) == names


def test_context_parallel_ranks_are_peers_that_read_whole_rows():
    mesh = read('output: {mesh: "dp=4, cp=2", sequence_length: 4096}\n' + SOURCES).output.mesh
    assert (mesh.data_ranks, mesh.world) == (4, 8)


def test_all_mistakes_are_told_at_once_in_order_of_their_places():
    assert refusal(
        "version: 2\n"
        "sede: 1\n"
        'output: {mesh: "data=4, cp=2", parts: {}, sequence_length: 4096}\n'
        "sources:\n"
        "  prose: {format: jsonn, files: x}\n"
        "  code: {format: parquet, text_field: ''}\n"
        "mix:\n"
        "  - from: 0\n"
        "    weights: {prose: 1, code: -1}\n"
        "  - ramp_to: 10\n"
        "    weights:\n"
        "      prsoe: 2\n"
        "      code: NaN\n"
        "balance: {method: gready}\n"
    ) == [
        "plan.yaml:1:10: version: version 2 of plan files is unknown; write version: 1, or upgrade stepfs",
        "plan.yaml:2:1: unknown key 'sede'; did you mean 'seed'?",
        (
            "plan.yaml:3:16: output.mesh: data looks like a data dimension and is none; call it dp, fsdp, ddp, hsdp or "
            "dp_…, and cp by itself"
        ),
        "plan.yaml:3:32: output: parts: several parts are not supported yet; remove the key",
        "plan.yaml:5:19: sources.prose.format: unknown format 'jsonn'; did you mean 'json'?",
        "plan.yaml:6:9: sources.code: 'files' is missing",
        "plan.yaml:6:39: sources.code.text_field: the name of a field is empty; write one, or remove the key",
        (
            "plan.yaml:9:31: mix[0].weights.code: '-1' is no weight; write a decimal number that is not negative, such "
            "as 2.5"
        ),
        "plan.yaml:12:7: mix[1]: unknown source 'prsoe'; did you mean 'prose'?",
        (
            "plan.yaml:13:13: mix[1].weights.code: 'NaN' is no weight; write a decimal number that is not negative, "
            "such as 2.5"
        ),
        "plan.yaml:14:19: balance.method: unknown method 'gready'; did you mean 'greedy'?",
    ]


def test_a_source_that_the_mix_forgets_is_named():
    text = OUTPUT + "sources:\n  a: {format: text, files: x}\n  b: {format: text, files: x}\nmix: {a: 1}\n"
    assert refusal(text) == [
        "plan.yaml:4:3: sources: source 'b' has no weight; give it one in the mix (0 keeps it out)"
    ]
    assert read(text.replace("a: 1", "a: 1, b: 0")).mix[0].weights["b"] == 0


def test_a_position_that_would_outgrow_its_bound_is_refused_before_the_first_step():
    def text(count: int) -> str:
        return (
            OUTPUT.replace("4096", "64")
            + "sources:\n"
            + "".join(f"  source-{number:05d}: {{format: text, files: x}}\n" for number in range(count))
        )

    read(text(400))
    (line,) = refusal(text(1200))
    assert line.startswith("plan.yaml:3:3: sources: the position of 1200 sources can reach ")
    assert line.endswith("bytes, the most is 65536; use fewer sources, or shorter names")


def test_a_plan_may_end_with_sources_whose_epochs_are_defaults():
    text = COMPLETE + "until: {exhausted: all}\ndefaults: {epochs: 1}\n"
    assert read(text).until.exhausted == "all"
    assert refusal(text.replace("files: x", "files: x, epochs: none")) == [
        "plan.yaml:3:20: until.exhausted: 'a' never ends; give every source epochs, such as epochs: 1"
    ]
