"""YAML that is broken, hostile or junk: one line with its place, never a traceback, and never much work."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepfs_producer.plan.file import yaml_file
from stepfs_producer.plan.file.values import PlanError
from stepfs_producer.plan.file.yaml_file import BYTES_MAX, read_plan

START = b'output: {mesh: "dp=8", sequence_length: 4096}\n'
COMPLETE = START + b"sources: {a: {format: jsonl, files: x}}\n"


def refusal(data: bytes) -> tuple[str, ...]:
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
        (b"- " * 100_001, "nested deeper than 32 levels; a plan is flatter"),
        (b"#" * (BYTES_MAX + 1), "p.yaml:1:1: 4194305 bytes; a plan has at most 4194304"),
        (COMPLETE + b"seed: 1\nseed: 2\n", "p.yaml:4:1: key 'seed' stands here twice (first at 3:1); remove one"),
        (COMPLETE + b"seed: !!int 1\n", "p.yaml:3:7: tags are not supported; write plain text"),
        (
            COMPLETE + b"seed: !!python/object/apply:os.system [x]\n",
            "p.yaml:3:7: tags are not supported; write plain text",
        ),
        (COMPLETE + b"? [a]\n: 1\n", "p.yaml:3:3: a key is a list or a mapping; write text"),
        (
            b"defaults: &d {long: drop}\n" + COMPLETE + b"pack:\n  <<: *d\n",
            "p.yaml:5:3: merge keys are not supported; write the keys out, or use defaults",
        ),
        (
            COMPLETE + b"seed: *none\n",
            "p.yaml:3:7: no YAML: found undefined alias 'none'; correct the line, or quote its text",
        ),
        (COMPLETE + b"\tseed: 1\n", "p.yaml:3:1: no YAML: "),
        (COMPLETE + b"seed: {1\n", "p.yaml:4:1: no YAML: "),
        (COMPLETE + b"---\na: 1\n", "p.yaml:3:1: no YAML: "),
        (COMPLETE + b"seed: \x01\n", "p.yaml:3:7: the character U+0001 may not stand in YAML; remove it"),
        (COMPLETE + b"seed: \xff\n", "p.yaml:3:7: not UTF-8; save the file as UTF-8"),
        ("output: {mesh: dp=1}".encode("utf-16"), "p.yaml:1:1: not UTF-8; save the file as UTF-8"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:40],
)
def test_a_file_that_is_no_plan_is_one_line(data, line):
    lines = refusal(data)
    assert any(line in one for one in lines), lines


def test_values_are_counted_with_those_that_are_written_out(monkeypatch):
    monkeypatch.setattr(yaml_file, "NODES_MAX", 1000)  # a hundred thousand take seconds to read
    line = "p.yaml:1000:3: more than 1000 values, aliases expanded; write a shorter plan"
    assert line in refusal(b"- 1\n" * 1001)


def test_mistakes_of_yaml_and_of_the_plan_are_told_together():
    assert refusal(COMPLETE + b"seed: 1\nseed: 2\ncost: !x {linear: 0}\nsede: 1\n") == (
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
    assert read_plan(b"\xef\xbb\xbf" + COMPLETE, "p.yaml").plan.seed == 0


KEYS = st.sampled_from(
    [
        "version",
        "seed",
        "output",
        "stages",
        "tokenizer",
        "defaults",
        "sources",
        "mix",
        "pack",
        "cost",
        "balance",
        "until",
        "a",
        "b",
        "format",
        "files",
        "weights",
        "from",
        "ramp_to",
        "mesh",
        "sequence_length",
        "micro_batches",
        "kind",
        "file",
        "call",
        "do",
        "block",
        "shuffle",
        "on_error",
        "epochs",
        "self",
        "cls",
        "data",
    ]
)
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
    located_or_plan(COMPLETE + data)
