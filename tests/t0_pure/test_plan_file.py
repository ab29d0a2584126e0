"""Plan files: what is accepted and what it means, and every mistake with its line and column."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from stepfs.format.ids import SLICES_MAX
from stepfs.view.naming import RANK_MAX
from stepfs_producer.plan.file import mesh
from stepfs_producer.plan.file.problems import PlanError
from stepfs_producer.plan.file.schema import Jsonl, Mix, Output, Parquet, Plan, Shuffle
from stepfs_producer.plan.file.yaml_file import read_plan
from stepfs_producer.plan.samples import Long, SkipBudget

PLANS = Path(__file__).parent / "plans"
FIRST = (PLANS / "first.yaml").read_text()


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
    assert plan.output.mesh.slices == 8
    assert plan.output.ext == ".safetensors"
    assert plan.tokenizer.eos == "</s>"
    assert plan.sources["code"] == Parquet("s3://corpora/code/*.parquet", text_field="content")
    assert plan.sources["prose"] == Jsonl("/data/web/")
    assert plan.mix == (Mix(weights={"code": 30, "prose": 70}),)


def test_the_second_plan_of_the_design_uses_nearly_all():
    plan = read((PLANS / "second.yaml").read_text())
    assert (plan.output.mesh.slices, plan.output.mesh.world) == (4, 16)
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
    ("setting", "name", "value"),
    [
        ("epochs: 2.5", "epochs", Fraction(5, 2)),
        ("epochs: none", "epochs", None),
        ("epochs: 1_000", "epochs", Fraction(1000)),
        ("holdout: 0.1%", "holdout", Fraction(1, 1000)),
        ("holdout: 0.001", "holdout", Fraction(1, 1000)),
        ("holdout: 0.0000000000000001%", "holdout", Fraction(1, 10**18)),
        ("shuffle: none", "shuffle", None),
        ("shuffle: {block: 1MiB}", "shuffle", Shuffle(block=1 << 20)),
        ("long: drop", "long", Long.DROP),
        ("text_field: no", "text_field", "no"),
        ("text_field: 1_000", "text_field", "1_000"),
        ("text_field: ~", "text_field", "~"),
        ("text_field: 2026-07-01", "text_field", "2026-07-01"),
        ("version: 1.10", "version", "1.10"),
    ],
)
def test_scalars_are_what_they_look_like(setting, name, value):
    found = getattr(read(MINIMAL.format(f", {setting}")).sources["a"], name)
    assert found == value
    assert type(found) is type(value)


def test_sources_may_be_called_as_yaml_calls_booleans_and_numbers():
    names = ["no", "on", "1_000", "null", "~", "weights", "0x10", "1e3", "from"]
    sources = "\n".join(f"  {name}: {{format: text, files: x}}" for name in names)
    mix = ", ".join(f"{name}: 1" for name in names)
    plan = read(
        f"output: {{mesh: dp=1, sequence_length: 8}}\nsources:\n{sources}\nmix: [{{weights: {{{mix}}}}}]\n"
    )
    assert list(plan.sources) == names
    assert list(plan.mix[0].weights) == names


def test_bounds_are_those_of_a_lake():
    assert mesh.SLICES_MAX == SLICES_MAX
    assert mesh._WORLD_MAX == RANK_MAX + 1


def test_all_mistakes_are_told_at_once_in_order_of_their_places():
    assert refusal(
        "version: 2\n"
        "sede: 1\n"
        'output: {mesh: "dp=4, cp=2", parts: {}, sequence_length: 4096}\n'
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
            "plan.yaml:3:16: output.mesh: cp > 1 is not supported yet; remove it, and let "
            "context-parallel ranks cut their rows"
        ),
        "plan.yaml:3:30: output: parts: several parts are not supported yet; remove the key",
        "plan.yaml:5:19: sources.prose.format: unknown format 'jsonn'; did you mean 'jsonl'?",
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


OUTPUT = 'output: {mesh: "dp=8", sequence_length: 4096}\n'
SOURCES = "sources: {a: {format: jsonl, files: x}}\n"
COMPLETE = OUTPUT + SOURCES


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1:1: 'output' is missing"),
        ("- 1\n", "1:1: write keys and values, such as {output: {…}, sources: {…}, mix: {…}}"),
        ("plan\n", "1:1: write keys and values, such as {output: {…}, sources: {…}, mix: {…}}"),
        (OUTPUT + "sources: {}\n", "2:10: sources: no source; declare at least one"),
        (OUTPUT + "sources:\n", "2:9: sources: write keys and values, such as {name: …}"),
        (
            OUTPUT + "sources: {a: x}\n",
            "2:14: sources.a: write keys and values, such as {format: jsonl, files: /data/web/}",
        ),
        (
            OUTPUT + 'sources: {"": {format: text, files: x}}\n',
            "2:11: sources: '' is no name of a source; use 1 to 200",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: []}}\n",
            "2:36: sources.a.files: a list names no files",
        ),
        (
            OUTPUT + "sources: {a: {format: text, files: [x, {}]}}\n",
            "2:36: sources.a.files: a mapping is no file name",
        ),
        (OUTPUT + "sources: {a: {files: x}}\n", "2:14: sources.a: 'format' is missing"),
        (
            OUTPUT + "sources: {a: {format: text, files: x, text_field: y}}\n",
            "2:39: sources.a: unknown key 'text_field'",
        ),
        (
            OUTPUT + "sources: {a: {format: 'm:C d', files: x}}\n",
            "2:23: sources.a.format: 'm:C d' names no class",
        ),
        (
            OUTPUT + "sources: {a: {format: parquet, files: x, mask_field: m}}\n",
            "2:54: sources.a.mask_field: mask_field stands",
        ),
        (
            COMPLETE + "mix: {a: 0}\n",
            "3:6: mix: all weights are zero; give at least one source a positive weight",
        ),
        (COMPLETE + "mix: {a: 1, b: 2}\n", "3:13: mix: unknown source 'b'; known: a"),
        (COMPLETE + "mix: {a: 1e3}\n", "3:10: mix.a: '1e3' is no weight"),
        (COMPLETE + "mix: [{ramp_to: 5, weights: {a: 1}}]\n", "3:8: mix[0]: a ramp needs an entry before it"),
        (
            COMPLETE + "mix: [{from: 5, weights: {a: 1}}]\n",
            "3:14: mix[0].from: the first entry begins at 0, not at 5",
        ),
        (
            COMPLETE + "mix: [{weights: {a: 1}}, {weights: {a: 1}}]\n",
            "3:26: mix[1]: say when its weights hold",
        ),
        (
            COMPLETE + "mix: [{weights: {a: 1}}, {from: 0, weights: {a: 1}}]\n",
            "3:33: mix[1].from: step 0 does not come",
        ),
        (
            COMPLETE + "mix: [{weights: {a: 1}}, {from: 9, ramp_to: 9, weights: {a: 1}}]\n",
            "3:36: mix[1]: give one of from",
        ),
        (COMPLETE + "mix: [{from: 0}]\n", "3:7: mix[0]: 'weights' is missing"),
        (COMPLETE + "mix: 3\n", "3:6: mix: write a list, such as [a, b]"),
        (COMPLETE + "stages: [{sequence_length: 8}]\n", "3:1: give one of output.sequence_length and stages"),
        (
            "output: {mesh: dp=1}\n" + SOURCES,
            "1:9: output: sequence_length is missing; add sequence_length: 4096, or stages",
        ),
        (
            "output: {mesh: dp=1, micro_batch_tokens: 4096}\nstages: [{sequence_length: 3000}]\n" + SOURCES,
            "2:28: stages[0].sequence_length: sequence_length 3000 does not divide micro_batch_tokens 4096",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{from: 3, sequence_length: 8}]\n" + SOURCES,
            "2:17: stages[0].from: the first stage begins at 0, not at 3",
        ),
        (
            "output: {mesh: dp=1}\nstages: [{sequence_length: 8}, {from: 0, sequence_length: 8}]\n" + SOURCES,
            "2:39: stages[1].from: step 0 does not come after step 0 of the stage before",
        ),
        (
            "output: {mesh: dp=16385, sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: its data dimensions make 16385 slices",
        ),
        (
            "output: {mesh: 'dp=8,dp=8', sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: a dimension is named twice",
        ),
        (
            "output: {mesh: 8, sequence_length: 8}\n" + SOURCES,
            "1:16: output.mesh: '8' is no mesh; write it as pp=2,dp=4,tp=2",
        ),
        (
            "output: {mesh: dp=1, sequence_length: 8, ext: pt}\n" + SOURCES,
            "1:47: output.ext: unknown extension 'pt'",
        ),
        (
            "output: {mesh: dp=8192, sequence_length: 1048576}\n" + SOURCES,
            "1:9: output: a step of 8589934592 tokens",
        ),
        (COMPLETE + "seed: -1\n", "3:7: seed: '-1' is no whole number"),
        (COMPLETE + "seed: 18446744073709551616\n", "3:7: seed: 18446744073709551616 is out of range"),
        (COMPLETE + "cost: {linear: -1}\n", "3:16: cost.linear: '-1' is no whole number"),
        (COMPLETE + "cost: {linear: 0}\n", "3:7: cost: a cost of nothing"),
        (COMPLETE + "cost: {linear: 1.5}\n", "3:16: cost.linear: '1.5' is no whole number"),
        (
            COMPLETE + "cost: {hidden_size: 8, linear: 1}\n",
            "3:7: cost: give one of hidden_size, linear and quadratic, or call",
        ),
        (COMPLETE + "cost: {call: flops}\n", "3:14: cost.call: 'flops' names no function; write module:name"),
        (COMPLETE + "tokenizer: {kind: huggingface}\n", "3:12: tokenizer: kind: huggingface needs a file"),
        (COMPLETE + "tokenizer: {file: x}\n", "3:19: tokenizer.file: kind: bytes has no file"),
        (
            COMPLETE + "defaults: {shuffle: {block: 8MB}}\n",
            "3:29: defaults.shuffle.block: '8MB' is no size; write a number",
        ),
        (
            COMPLETE + "defaults: {shuffle: {block: 1KiB}}\n",
            "3:29: defaults.shuffle.block: '1KiB' is out of range",
        ),
        (
            COMPLETE + "defaults: {holdout: 100%}\n",
            "3:21: defaults.holdout: '100%' is no share; write one below 100%",
        ),
        (COMPLETE + "defaults: {epochs: 0}\n", "3:20: defaults.epochs: '0' is no number of epochs"),
        (
            COMPLETE + "until: {exhausted: first}\n",
            "3:20: until.exhausted: no source ever ends; give one epochs",
        ),
        (
            COMPLETE + "until: {exhausted: all}\n",
            "3:20: until.exhausted: 'a' never ends; give every source epochs",
        ),
        (COMPLETE + "until: 5\n", "3:8: until: write keys and values, such as {steps: 200000}"),
    ],
)
def test_a_mistake_has_its_place_and_says_what_to_do(text, line):
    found = refusal(text)
    assert any(one.startswith(f"plan.yaml:{line}") for one in found), found


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
