"""A plan file: what it may say, as YAML and as a plan, and each mistake with its place and what to do."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepfs_producer.plan.file import yaml_file
from stepfs_producer.plan.file.yaml_file import BYTES_MAX, read_plan
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.parts import Mix, Output
from stepfs_producer.plan.sources import Fim, Jsonl, Long, Pair, Parquet, Shuffle, SkipBudget, Text
from stepfs_producer.plan.values import PlanError

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
        sources={"code": Parquet("s3://corpora/code/*.parquet", text_field="content"), "prose": Jsonl("/data/web/")},
        mix=[Mix(weights={"code": 30, "prose": 70})],
    )
    assert plan == read(FIRST)


def test_a_part_is_checked_when_it_is_made_and_never_changes_after():
    with pytest.raises(PlanError, match=r"^mesh: 'dp' is no mesh"):
        Output(mesh="dp")
    output = Output(mesh="dp=2", sequence_length="4_096")
    with pytest.raises(FrozenInstanceError, match=r"Output\.mesh cannot be set"):
        output.mesh = "dp=3"
    assert str(inspect.signature(Text)).startswith("(*files: str, shuffle: ")
    assert (output.given, repr(Pair(chosen="good"))) == ({"mesh", "sequence_length"}, "Pair(chosen='good')")
    assert {output: 1}[pickle.loads(pickle.dumps(output))] == 1
    assert Fim(tokens=("a", "b", "c")) != Fim(tokens=("a", "b", "c"), rate="10%")


MINIMAL = 'output: {{mesh: "dp=2", sequence_length: 64}}\nsources:\n  a: {{format: jsonl, files: x{0}}}\n'


@pytest.mark.parametrize(
    ("setting", "name", "value"), [
        ("epochs: 2.5", "epochs", Fraction(5, 2)), ("epochs: none", "epochs", None),
        ("epochs: 1_000", "epochs", Fraction(1000)),
        ("holdout: 0.1%", "holdout", Fraction(1, 1000)),
        ("holdout: 0.001", "holdout", Fraction(1, 1000)),
        ("holdout: 0.0000000000000001%", "holdout", Fraction(1, 10**18)), ("shuffle: none", "shuffle", None),
        ("shuffle: {block: 1MiB}", "shuffle", Shuffle(block=1 << 20)),
        ("shuffle: {block: 0.5G}", "shuffle", Shuffle(block=1 << 29)), ("shuffle: {block: 8M}", "shuffle", Shuffle()),
        ("shuffle: {block: 1_024 KiB}", "shuffle", Shuffle(block=1 << 20)), ("long: drop", "long", Long.DROP),
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

    read(text(380))
    (line,) = refusal(text(1200))
    assert line.startswith("plan.yaml:3:3: sources: the position of 1200 sources can reach ")
    assert line.endswith("bytes, the most is 65536; use fewer sources, or shorter names")


def test_a_plan_may_end_with_sources_whose_epochs_are_defaults():
    text = COMPLETE + "until: {exhausted: all}\ndefaults: {epochs: 1}\n"
    assert read(text).until.exhausted == "all"
    assert refusal(text.replace("files: x", "files: x, epochs: none")) == [
        "plan.yaml:3:20: until.exhausted: 'a' never ends; give every source epochs, such as epochs: 1"
    ]


START = b'output: {mesh: "dp=8", sequence_length: 4096}\n'
WHOLE = START + b"sources: {a: {format: jsonl, files: x}}\n"


def refused(data: bytes) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        read_plan(data, "p.yaml")
    return caught.value.lines


def bomb(levels: int) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (bomb(20), "p.yaml:1:13: more than 100000 values, aliases expanded; write a shorter plan"),
        (b"a: &a [*a]\n", "nested deeper than 32 levels; a plan is flatter"),
        (b"a: &a {b: *a}\n", "nested deeper than 32 levels; a plan is flatter"),
        (b"[" * 5000, "p.yaml:1:33: nested deeper than 32 levels; a plan is flatter"),
        (b"[" + b"[1], " * 40 + b"[" * 5000, "p.yaml:1:233: nested deeper than 32 levels; a plan is flatter"),
        (b"- " * 100_001, "nested deeper than 32 levels; a plan is flatter"),
        (b"#" * (BYTES_MAX + 1), "p.yaml:1:1: 4194305 bytes; a plan has at most 4194304"),
        (WHOLE + b"seed: 1\nseed: 2\n", "p.yaml:4:1: key 'seed' stands here twice (first at 3:1); remove one"),
        (WHOLE + b"seed: !!int 1\n", "p.yaml:3:7: tags are not supported; write plain text"),
        (
            WHOLE + b"seed: !!python/object/apply:os.system [x]\n",
            "p.yaml:3:7: tags are not supported; write plain text",
        ),
        (WHOLE + b"? [a]\n: 1\n", "p.yaml:3:3: a key is a list or a mapping; write text"),
        (
            b"defaults: &d {long: drop}\n" + WHOLE + b"pack:\n  <<: *d\n",
            "p.yaml:5:3: merge keys are not supported; write the keys out, or use defaults",
        ),
        (
            WHOLE + b"seed: *none\n",
            "p.yaml:3:7: no YAML: found undefined alias 'none'; correct the line, or quote its text",
        ),
        (WHOLE + b"\tseed: 1\n", "p.yaml:3:1: no YAML: "),
        (WHOLE + b"seed: {1\n", "p.yaml:4:1: no YAML: "),
        (WHOLE + b"---\na: 1\n", "p.yaml:3:1: no YAML: "),
        (WHOLE + b"seed: \x01\n", "p.yaml:3:7: the character U+0001 may not stand in YAML; remove it"),
        (WHOLE + b"seed: \xff\n", "p.yaml:3:7: not UTF-8; save the file as UTF-8"),
        ("output: {mesh: dp=1}".encode("utf-16"), "p.yaml:1:1: not UTF-8; save the file as UTF-8"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:40],
)
def test_a_file_that_is_no_plan_is_one_line(data, line):
    lines = refused(data)
    assert any(line in one for one in lines), lines


def test_values_are_counted_with_those_that_are_written_out(monkeypatch):
    monkeypatch.setattr(yaml_file, "NODES_MAX", 1000)  # a hundred thousand take seconds to read
    line = "p.yaml:1000:3: more than 1000 values, aliases expanded; write a shorter plan"
    assert line in refused(b"- 1\n" * 1001)


def test_mistakes_of_yaml_and_of_the_plan_are_told_together():
    assert refused(WHOLE + b"seed: 1\nseed: 2\ncost: !x {linear: 0}\nsede: 1\n") == (
        "p.yaml:4:1: key 'seed' stands here twice (first at 3:1); remove one",
        "p.yaml:5:7: cost: a cost of nothing; give linear or quadratic a positive number",
        "p.yaml:5:7: tags are not supported; write plain text",
        "p.yaml:6:1: unknown key 'sede'; did you mean 'seed'?",
    )


def test_aliases_are_what_they_stand_for():
    data = START + b"sources:\n  a: &a {format: jsonl, files: x}\n  b: *a\n"
    plan = read_plan(data, "p.yaml").plan
    assert plan.sources["a"] == plan.sources["b"]


def test_a_byte_order_mark_is_no_text():
    assert read_plan(b"\xef\xbb\xbf" + WHOLE, "p.yaml").plan.seed == 0


KEYS = st.sampled_from(
    [
        "version", "seed", "output", "stages", "tokenizer", "defaults", "sources", "mix", "pack", "cost", "balance",
        "until", "a", "b", "format", "files", "weights", "from", "ramp_to", "mesh", "sequence_length",
        "micro_batches", "kind", "file", "call", "do", "block", "shuffle", "on_error", "epochs", "self", "cls",
        "data",
    ]
)  # fmt: skip
SCALARS = st.one_of(
    KEYS,
    st.sampled_from(
        ["1", "0", "-1", "NaN", "none", "null", "0.1%", "8MiB", "dp=2", "jsonl", "m:f", "best_fit", "no", "{}"]
    ),
    st.text(max_size=6),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=25,
)


def flow(tree: object) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(flow, tree)) + "]"
    quoted = str(tree).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{quoted}"'


def located_or_plan(data: bytes) -> None:
    try:
        read_plan(data, "p.yaml")
    except PlanError as error:
        for line in error.lines:
            name, row, column, what = line.split(":", 3)
            assert name == "p.yaml"
            assert int(row) >= 1
            assert int(column) >= 1
            assert what.strip()


@given(st.dictionaries(KEYS, TREES, max_size=12))
@example({"version": []})
@example({"sources": {"a": {"self": "1"}}, "mix": [[]]})
@example({"output": {"mesh": {}}, "sources": [], "mix": {"weights": {}}})
def test_a_tree_of_junk_is_a_plan_or_lines_with_places(tree):
    located_or_plan(flow(tree).encode("utf-8", "surrogatepass"))


@given(st.one_of(st.binary(max_size=60), st.text("ab:-[]{}&*!|>'\"%@`#,? \n\t<=~", max_size=60).map(str.encode)))
def test_junk_is_lines_with_places(data):
    located_or_plan(data)
    located_or_plan(WHOLE + data)


COLUMNS = "output: {mesh: dp=2, sequence_length: 8, columns: {pixels: {dtype: uint8, shape: [588]}}}\n"
MODEL = "tokenizer: {kind: huggingface, file: t.json}\n"
CALLED = "sources: {a: {format: parquet, files: x, transform: 'm:f'}}\n"


@pytest.mark.parametrize(
    ("text", "line"), [
        ("", "1:1: 'output' is missing"),
        ("- 1\n", "1:1: write keys and values, such as {output: {…}, sources: {…}, mix: {…}}"),
        ("plan\n", "1:1: write keys and values, such as {output: {…}, sources: {…}, mix: {…}}"),
        (OUTPUT + "sources: {}\n", "2:10: sources: no source; declare at least one"),
        (OUTPUT + "sources:\n", "2:9: sources: write keys and values, such as {name: …}"),
        (OUTPUT + "sources: {a: x}\n",
         "2:14: sources.a: write keys and values, such as {format: jsonl, files: /data/web/}"),
        (OUTPUT + 'sources: {"": {format: text, files: x}}\n',
         "2:11: sources: '' is no name of a source; use 1 to 200"),
        (OUTPUT + "sources: {a: {format: text, files: []}}\n", "2:36: sources.a.files: a list names no files"),
        (OUTPUT + "sources: {a: {format: text, files: [x, {}]}}\n",
         "2:36: sources.a.files: a mapping is no file name"),
        (OUTPUT + "sources: {a: {files: x}}\n", "2:14: sources.a: 'format' is missing"),
        (OUTPUT + "sources: {a: {format: text, files: x, text_field: y}}\n",
         "2:39: sources.a: unknown key 'text_field'"),
        (OUTPUT + "sources: {a: {format: 'm:C d', files: x}}\n", "2:23: sources.a.format: 'm:C d' names no class"),
        (OUTPUT + "sources: {a: {format: parquet, files: x, mask_field: m}}\n",
         "2:54: sources.a.mask_field: mask_field stands"),
        ("output: {mesh: dp=2, sequence_length: 8, files: rows}\n" + SOURCES,
         "1:49: output.files: unknown kind of files 'rows'; known: micro_batches, ranks"),
        ("output: {mesh: dp=128, sequence_length: 8, micro_batches: 129, files: micro_batches}\n" + SOURCES,
         "1:59: output.micro_batches: a step of 16512 files (ranks × micro_batches) is too large; the most is 16384"),
        (COLUMNS.replace("uint8", "int4") + CALLED,
         "1:68: output.columns.pixels.dtype: unknown dtype 'int4'; did you mean 'int64'?"),
        (COLUMNS.replace("[588]", "588") + CALLED,
         "1:82: output.columns.pixels.shape: '588' is no shape; write at most 8 sizes, such as [588]"),
        (COLUMNS.replace("[588]", "[4096, 4097]") + CALLED,
         "1:82: output.columns.pixels.shape: a row of 16781312 bytes; the most is 16777216"),
        (COLUMNS.replace("pixels", "labels") + CALLED,
         "1:52: output.columns: 'labels' is no name of a column; use up to 24 of a-z, 0-9 and _, and none of the fi"),
        (COLUMNS.replace("pixels", "grid_counts") + CALLED,
         "1:52: output.columns: 'grid_counts' is no name of a column"),
        (COLUMNS.replace("{mesh", "{ext: .npy, mesh") + CALLED,
         "1:53: output: .npy files have no room for columns; choose .safetensors, .pt or .tar"),
        (OUTPUT.replace("{mesh", "{ext: .bin, mesh") + SOURCES,
         "1:15: output.ext: .bin files hold token ids alone, so only `stepfs-produce text` makes them; choose .safetensors, or"),
        (OUTPUT.replace("{mesh", "{ext: .npy, mesh") + "sources: {a: {format: jsonl, files: x, pair: {}}}\n",
         "2:40: sources.a: .npy files have no spans, which say of which answer a document is; choose .safetensors, .pt or"),
        (OUTPUT + MODEL + "sources: {a: {format: jsonl, files: x, fim: {tokens: [a, b, c]}}}\npack: concat\n",
         "4:7: pack: concat cuts documents, and those of source 'a' are whole; use best_fit"),
        (OUTPUT + "sources: {a: {format: json, files: x, delimiter: ;}}\n",
         "2:39: sources.a: only csv has a delimiter; remove it"),
        (OUTPUT + "sources: {a: {format: csv, files: x, delimiter: tab}}\n",
         "2:49: sources.a.delimiter: 'tab' is no delimiter; write one character, such as"),
        (COLUMNS + MODEL + "sources: {a: {format: jsonl, files: x, transform: 'm:f', fim: {tokens: [a, b, c]}}}\n",
         "3:58: sources.a: fim rearranges tokens, and rows of columns would not follow them; remove fim, or the columns"),
        (COLUMNS + SOURCES,
         "1:42: output: no source has a transform that could give columns; add transform: module:function to one"),
        (COLUMNS + CALLED + "pack: concat\n",
         "3:7: pack: concat cuts documents, and a sample with rows in a column is never cut; use best_fit"),
        (COLUMNS + CALLED + "cost: {hidden_size: 64, columns: {pixel: 3}}\n",
         "3:35: cost.columns: unknown column 'pixel'; did you mean 'pixels'?"),
        (OUTPUT + CALLED + "cost: {columns: {pixels: 3}}\n",
         "3:18: cost.columns: unknown column 'pixels'; declare it: output: {columns: {pixels: {dtype: uint8, shape: [588]}}}"),
        (COLUMNS + CALLED + "cost: {columns: {pixels: -3}}\n", "3:26: cost.columns.pixels: '-3' is no whole number"),
        (COLUMNS + CALLED + "cost: {call: 'm:f', columns: {pixels: 3}}\n",
         "3:21: cost: call gives the whole cost of a sample; remove one"),
        (COLUMNS + CALLED + "balance: {loads: [tokens, pixel]}\n",
         "3:27: balance.loads[1]: unknown load 'pixel'; did you mean 'pixels'?"),
        (COLUMNS + CALLED + "balance: {loads: [pixels]}\n",
         "3:18: balance.loads: name several different loads, such as [tokens, pixels]; a single one is what cost says"),
        (COLUMNS + CALLED + "balance: {method: greedy, loads: [tokens, pixels]}\n",
         "3:19: balance.method: loads are balanced by a method of their own; remove method"),
        (COLUMNS + "sources: {a: {format: parquet, files: x, images: jpg}}\n",
         "2:50: sources.a.images: images need a transform to put them into a sample; add transform: module:function"),
        (COLUMNS + "sources: {a: {format: jsonl, files: x, transform: 'm:f', images: jpg}}\n",
         "2:58: sources.a: unknown key 'images'"),
        (COLUMNS + CALLED.replace("}}", ", images: {fields: jpg, patches_max: 3}}}"),
         "2:95: sources.a.images.patches_max: less than the 4 patches that are merged"),
        ("output: {mesh: dp=8193, sequence_length: 8, columns: {pixels: {dtype: uint8, shape: [1], file: own}}}\n" + CALLED,
         "1:54: output.columns: a step of 16386 files (ranks × 1 and columns with file: own) is too large; the most is"),
        (COMPLETE + "mix: {a: 0}\n", "3:6: mix: all weights are zero; give at least one source a positive weight"),
        (COMPLETE + "mix: {a: 1, b: 2}\n", "3:13: mix: unknown source 'b'; known: a"),
        (COMPLETE + "mix: {a: 1e3}\n", "3:10: mix.a: '1e3' is no weight"),
        (COMPLETE + "mix: [{ramp_to: 5, weights: {a: 1}}]\n", "3:8: mix[0]: a ramp needs an entry before it"),
        (COMPLETE + "mix: [{from: 5, weights: {a: 1}}]\n",
         "3:14: mix[0].from: the first entry begins at 0, not at 5"),
        (COMPLETE + "mix: [{weights: {a: 1}}, {weights: {a: 1}}]\n", "3:26: mix[1]: say when its weights hold"),
        (COMPLETE + "mix: [{weights: {a: 1}}, {from: 0, weights: {a: 1}}]\n",
         "3:33: mix[1].from: step 0 does not come"),
        (COMPLETE + "mix: [{weights: {a: 1}}, {from: 9, ramp_to: 9, weights: {a: 1}}]\n",
         "3:36: mix[1]: give one of from"),
        (COMPLETE + "mix: [{from: 0}]\n", "3:7: mix[0]: 'weights' is missing"),
        (COMPLETE + "mix: {weights: {a: 1}, temperature: 0.5}\n",
         "3:24: mix: temperature needs sizes: {source: tokens}; check prints the tokens of each"),
        (COMPLETE + "mix: {sizes: {a: 1}, alpha: 0.5, temperature: 2}\n", "3:34: mix: give one of alpha and temperature"),
        (COMPLETE + "mix: {weights: {a: 1}, sizes: {a: 1}}\n", "3:6: mix: give one of weights, sizes and tokens"),
        (COMPLETE + "mix: {sizes: {b: 1}}\n", "3:1: unknown source 'b'; known: a"),
        (COMPLETE + "mix: 3\n", "3:6: mix: write a list, such as [a, b]"),
        (COMPLETE + "stages: [{sequence_length: 8}]\n", "3:1: give one of output.sequence_length and stages"),
        ("output: {mesh: dp=1}\n" + SOURCES,
         "1:9: output: sequence_length is missing; add sequence_length: 4096, or stages"),
        ("output: {mesh: dp=1, micro_batch_tokens: 4096}\nstages: [{sequence_length: 3000}]\n" + SOURCES,
         "2:28: stages[0].sequence_length: sequence_length 3000 does not divide micro_batch_tokens 4096"),
        ("output: {mesh: dp=1}\nstages: [{from: 3, sequence_length: 8}]\n" + SOURCES,
         "2:17: stages[0].from: the first stage begins at 0, not at 3"),
        ("output: {mesh: dp=1}\nstages: [{sequence_length: 8}, {from: 0, sequence_length: 8}]\n" + SOURCES,
         "2:39: stages[1].from: step 0 does not come after step 0 of the stage before"),
        (OUTPUT + "sources: {a: {format: text, files: x, sequence_length: 16384}}\n",
         "2:56: sources.a.sequence_length: 16384 tokens have no room in the rows of 4096 from step 0 on; choose at most 4096"),
        (OUTPUT + "sources: {a: {format: text, files: x, sequence_length: 3000}}\n",
         "2:56: sources.a.sequence_length: 3000 does not divide the rows of 4096 from step 0 on, so their ends would"),
        ("output: {mesh: dp=1}\nstages: [{sequence_length: 8}, {from: 9, sequence_length: 16, lengths: {a: 5}}]\n" + SOURCES,
         "2:76: stages[1].lengths.a: 5 does not divide the rows of 16 from step 9 on, so their ends would stay empty; cho"),
        ("output: {mesh: dp=1}\nstages: [{sequence_length: 8, lengths: {aa: 4}}]\n" + SOURCES,
         "2:41: stages[0].lengths: unknown source 'aa'; did you mean 'a'?"),
        ("output: {mesh: dp=1}\nstages: [{sequence_length: 8, lengths: {a: 0}}]\n" + SOURCES,
         "2:44: stages[0].lengths.a: 0 is out of range"),
        ("output: {mesh: dp=16385, sequence_length: 8}\n" + SOURCES,
         "1:16: output.mesh: its data dimensions make 16385 slices"),
        ("output: {mesh: 'pp=2,cp=4', sequence_length: 8}\n" + SOURCES,
         "1:16: output.mesh: it has no data dimension; add one, such as dp=4"),
        ("output: {mesh: 'dp=16384,tp=128', sequence_length: 8}\n" + SOURCES,
         "1:16: output.mesh: it has 2097152 ranks; the most is 1048575"),
        ("output: {mesh: 'dp=8,dp=8', sequence_length: 8}\n" + SOURCES,
         "1:16: output.mesh: a dimension is named twice"),
        ("output: {mesh: 8, sequence_length: 8}\n" + SOURCES,
         "1:16: output.mesh: '8' is no mesh; write it as pp=2,dp=4,tp=2"),
        ("output: {mesh: dp=1, sequence_length: 8, ext: pt}\n" + SOURCES, "1:47: output.ext: unknown extension 'pt'"),
        ("output: {mesh: dp=8192, sequence_length: 1048576}\n" + SOURCES, "1:9: output: a step of 8589934592 tokens"),
        (OUTPUT + "sources: {a: {format: text, files: x, shard: 2/2}}\n",
         "2:46: sources.a.shard: shard 2/2 does not exist; the first of 2 is 0/2"),
        (OUTPUT + "sources: {a: {format: text, files: x, shard: half}}\n",
         "2:46: sources.a.shard: 'half' is no shard; write i/n"),
        (OUTPUT + "sources: {a: {format: text, files: x, records: file}}\n",
         "2:48: sources.a.records: unknown kind of records 'file'; did you mean 'files'?"),
        (COMPLETE + "seed: -1\n", "3:7: seed: '-1' is no whole number"),
        (COMPLETE + "seed: 18446744073709551616\n", "3:7: seed: 18446744073709551616 is out of range"),
        (COMPLETE + "cost: {linear: -1}\n", "3:16: cost.linear: '-1' is no whole number"),
        (COMPLETE + "cost: {linear: 0}\n", "3:7: cost: a cost of nothing"),
        (COMPLETE + "cost: {linear: 1.5}\n", "3:16: cost.linear: '1.5' is no whole number"),
        (COMPLETE + "cost: {hidden_size: 8, linear: 1}\n",
         "3:7: cost: give one of hidden_size, linear and quadratic, or call"),
        (COMPLETE + "cost: {call: flops}\n", "3:14: cost.call: 'flops' names no function; write module:name"),
        (COMPLETE + "tokenizer: tokenizer.json\n",
         "3:12: tokenizer: 'tokenizer.json' is a file; write {kind: huggingface, file: tokenizer.json}"),
        (COMPLETE + "tokenizer: {kind: huggingface}\n", "3:12: tokenizer: kind: huggingface needs a file"),
        (COMPLETE + "tokenizer: {file: x}\n", "3:19: tokenizer.file: kind: bytes has no file"),
        (COMPLETE + "defaults: {shuffle: {block: 8XB}}\n",
         "3:29: defaults.shuffle.block: '8XB' is no size; write a number"),
        (COMPLETE + "defaults: {shuffle: {block: 1KiB}}\n", "3:29: defaults.shuffle.block: '1KiB' is out of range"),
        (COMPLETE + "defaults: {holdout: 100%}\n",
         "3:21: defaults.holdout: '100%' is no share; write one below 100%"),
        (COMPLETE + "defaults: {epochs: 0}\n", "3:20: defaults.epochs: '0' is no number of epochs"),
        (COMPLETE + "until: {exhausted: first}\n", "3:20: until.exhausted: no source ever ends; give one epochs"),
        (COMPLETE + "until: {exhausted: all}\n", "3:20: until.exhausted: 'a' never ends; give every source epochs"),
        (COMPLETE + "until: 5\n", "3:8: until: write keys and values, such as {steps: 200000}"),
    ],
)  # fmt: skip
def test_a_mistake_has_its_place_and_says_what_to_do(text, line):
    found = refusal(text)
    assert any(one.startswith(f"plan.yaml:{line}") for one in found), found
