"""`stepfs-produce check`: what it says of a plan and its sources, and how it refuses them."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import json_schemas
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from lakes import produce
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from stepfs._internal.limits import usable_cpus
from stepfs.format.ids import JSON_SCHEMA

PLANS = Path(__file__).parents[1] / "t0_pure/plans"

check, keys = partial(produce, "check"), partial(produce, "keys")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    web = tmp_path / "web"
    web.mkdir()
    for file in range(2):
        lines = [json.dumps({"text": "x" * 99, "url": "u" * 50}) for _ in range(500)]
        (web / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "notes.txt").write_text("nine byte\n" * 100)
    return tmp_path


PLAN = """\
output: {mesh: "pp=2,dp=4", sequence_length: 64, micro_batches: 2}
sources:
  notes: {format: text, records: lines, files: notes.txt, epochs: 2, sequence_length: 32}
  web: {format: jsonl, files: web}
mix:
  - weights: {notes: 30, web: 70}
  - {ramp_to: 50, weights: {notes: 50, web: 50}}
until: {steps: 100}
"""


@pytest.fixture
def plan(corpus: Path) -> Path:
    path = corpus / "plan.yaml"
    path.write_text(PLAN)
    return path


def test_the_document_says_what_the_plan_amounts_to(plan):
    done = check(plan, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = done.document
    assert document["schema"] == JSON_SCHEMA
    assert (document["slices"], document["ranks"], document["mesh"]) == (4, 8, "pp=2,dp=4")
    assert document["step_tokens"] == 4 * 2 * 64
    assert document["steps"] == 100
    assert document["stages"] == [{"from": 0, "sequence_length": 64, "lengths": {"notes": 32}}]
    assert document["position_bytes"] < document["position_bytes_limit"] == 65536
    assert document["memory_bytes"] > 64 << 20
    notes, web = document["sources"]["notes"], document["sources"]["web"]
    assert (notes["format"], notes["files"], notes["bytes"], notes["tokens"]) == ("text", 1, 1000, 1000)
    assert (notes["epochs"], web["epochs"]) == (2.0, None)
    assert (web["files"], web["bytes"]) == (
        2,
        2 * 500 * len(json.dumps({"text": "x" * 99, "url": "u" * 50}) + "\n"),
    )
    assert web["tokens"] == pytest.approx(1000 * 100, rel=0.01), "99 bytes and the end of the document"
    # The mean share of notes is 30 % + 20 % × 24.5 / 50 over 50 steps, then 50 % over 50.
    wanted = 512 * 50 * (0.30 + 0.20 * 24.5 / 50 + 0.50)
    assert notes["epochs_needed"] == pytest.approx(wanted / 1000, rel=1e-4)
    warning, lines = document["warnings"]
    assert lines.startswith("source notes: a document has 10 tokens in the mean, as each line is one; records: files ")
    assert notes["document_tokens"] == 10
    assert re.match(r"source notes: the plan takes about 23\.0 epochs of it and it has 2; ", warning)
    json_schemas.check("produce-check", document)


def test_files_of_micro_batches_are_counted_as_slices(plan):
    text = plan.read_text()
    assert "mesh:" in text
    plan.write_text(text.replace("mesh:", "files: micro_batches, mesh:"))
    done = check(plan)
    assert done.returncode == 0, done.stderr
    assert "slices     8 (mesh pp=2,dp=4: 8 ranks; each micro-batch of it is a slice)" in done.stdout
    assert ": 4 data ranks × 2 micro-batches × " in done.stdout


def test_the_page_shows_shares_at_each_entry_of_the_mix(plan):
    done = check(plan)
    assert done.returncode == 0
    assert "slices     4 (mesh pp=2,dp=4: 8 ranks; each coordinate of dp is a slice)" in done.stdout
    assert "2 micro-batches × 64; rows of 64 (notes 32)\n" in done.stdout
    assert re.search(
        r"^memory     \d.* MiB at least, with one worker per core; \d.* while all", done.stdout, re.MULTILINE
    )
    header, notes, web = (line for line in done.stdout.splitlines() if line.startswith(("SOURCE", "notes ", "web ")))
    assert re.split(r" {2,}", header) == [
        "SOURCE", "FORMAT", "FROM STEP 0", "TO STEP 50", "FILES", "BYTES", "TOKENS", "DOCUMENT", "LEARNED", "EPOCHS",
    ]  # fmt: skip
    assert re.split(r" {2,}", notes)[:8] == [
        "notes",
        "text",
        "30.000%",
        "50.000%",
        "1",
        "1000 B",
        "≈ 1000",
        "≈ 10",
    ]
    assert "note: source notes: a document has 10 tokens in the mean, as each line is one; " in done.stdout
    plan.write_text(PLAN.replace("records: lines, ", ""))
    assert "as each line" not in check(plan).stdout
    assert re.split(r" {2,}", web)[2:4] == ["70.000%", "50.000%"]


@pytest.mark.parametrize("name", ["first", "second", "bytes"])
def test_the_plans_of_the_design_are_right_by_their_text(name):
    done = check(PLANS / f"{name}.yaml", "--no-sources", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = done.document
    assert {source["files"] for source in document["sources"].values()} == {None}
    json_schemas.check("produce-check", document)


def test_every_key_is_listed_with_its_meaning():
    """Every field of every part of a plan, as an editor's schema has it."""
    lines, schema = keys().stdout, keys("--json").document
    for either in [schema, *schema["$defs"].values()]:
        part = either["anyOf"][0] if "anyOf" in either else either
        for key, field in part["properties"].items():
            assert re.search(rf"^  {key}\b", lines, re.MULTILINE), key
            assert " ".join(field.get("description", "").split()[:3]) in " ".join(lines.split())
    assert len(lines.splitlines()) < 600


def test_the_schema_accepts_the_plans_and_refuses_a_misspelt_one():
    schema = keys("--json").document
    validator = jsonschema.Draft202012Validator(schema)
    for path in PLANS.glob("*.yaml"):
        document = yaml.safe_load(path.read_text())
        assert list(validator.iter_errors(document)) == []
        assert list(validator.iter_errors(document | {"sede": 1}))
        assert list(validator.iter_errors(document | {"balance": "gready"}))
    assert list(validator.iter_errors(yaml.safe_load(PLAN))) == []


def test_mistakes_are_told_at_once_with_their_lines(plan):
    plan.write_text(PLAN.replace("ramp_to: 50", "ramp_to: 0").replace("notes: 50,", "note: 50,"))
    done = check(plan)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "stepfs-produce: the plan has 2 mistakes:",
        f"{plan}:7:15: mix[1].ramp_to: step 0 does not come after step 0 of the entry before; put them in order",
        f"{plan}:7:28: mix[1]: unknown source 'note'; did you mean 'notes'?",
    ]


def test_what_is_wrong_with_sources_is_told_at_once_with_its_place(plan):
    (plan.parent / "empty.txt").write_text("")
    (plan.parent / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 500)[:-20])
    plan.write_text(
        "output: {mesh: dp=1, sequence_length: 64}\n"
        "tokenizer: {kind: huggingface, file: tokenizer.json}\n"
        "cost: {call: no_such_module_here:flops}\n"
        "sources:\n"
        "  gone: {format: text, files: gone}\n"
        "  empty: {format: text, files: empty.txt}\n"
        "  mine: {format: text, files: notes.txt, transform: no_such_module_here:render}\n"
    )
    done = check(plan)
    assert done.returncode == 2
    first, *lines = done.stderr.splitlines()
    assert first == "stepfs-produce: the plan has 5 mistakes:"
    starts = [f"{plan}:{place}: " for place in ("2:38", "3:14", "5:31", "6:32", "7:53")]
    paths = [
        "tokenizer.file: ", "cost.call: ", "sources.gone.files: ", "sources.empty.files: ",
        "sources.mine.transform: ",
    ]  # fmt: skip
    for line, start, path in zip(lines, starts, paths, strict=True):
        assert line.startswith(start + path)


def test_an_absent_source_alone_is_absent(plan):
    plan.write_text(PLAN.replace("files: web", "files: wbe"))
    done = check(plan)
    assert done.returncode == 3
    assert (
        done.stderr
        == f"stepfs-produce: {plan}:4:31: sources.web.files: {plan.parent}/wbe: no such file or directory; name files that exist\n"
    )


def test_records_that_cannot_be_decoded_are_noted(plan):
    (plan.parent / "web/0.jsonl").write_text('{"text": 5}\n{"text": "a"}\n' * 50)
    (plan.parent / "web/1.jsonl").unlink()
    done = check(plan, "--json")
    assert done.returncode == 0
    [warning] = [one for one in done.document["warnings"] if "web" in one]
    assert warning.startswith("source web: 50 of 100 records looked at cannot be decoded (")
    assert "on_error: {do: skip}" in warning


def test_deep_reads_every_record_and_names_the_bad_ones(plan: Path) -> None:
    web = plan.parent / "web"
    data = (web / "1.jsonl").read_bytes()
    (web / "1.jsonl").write_bytes(data + b"not JSON\n")
    (web / "2.jsonl.gz").write_bytes(gzip.compress(data)[:-9])
    quick = check(plan)
    assert (quick.returncode, "cannot be decoded" in quick.stdout) == (0, False)
    deep = check(plan, "--deep")
    assert deep.returncode == 0, deep.stderr
    assert f"0/1.jsonl at {len(data)}: not JSON" in deep.stdout
    assert "0/2.jsonl.gz at " in deep.stdout
    assert "2 of 1502 records looked at cannot be decoded" in deep.stdout
    document = check(plan, "--deep", "--json").document
    assert document["sources"]["web"]["tokens"] == 1500 * 100
    refused = check(plan, "--deep", "--no-sources")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_the_memory_of_a_page_of_large_values_is_noted(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepfs_producer.cli.reports._PAGE_BYTES_MAX", 1 << 20)
    table = pa.table({"text": ["x" * 10_000] * 400})
    pq.write_table(table, plan.parent / "a.parquet", row_group_size=200, use_dictionary=False)
    plan.write_text(PLAN.replace("format: jsonl, files: web", "format: parquet, files: a.parquet"))
    assert (
        "a page of its Parquet files may have 1.91 MiB, and a worker that reads it takes 5.72 MiB" in check(plan).stdout
    )


def test_a_source_of_which_no_record_can_be_decoded_is_refused(plan):
    (plan.parent / "web/0.jsonl").write_text('{"id": 5, "txt": "a"}\n' * 50)
    (plan.parent / "web/1.jsonl").unlink()
    done = check(plan)
    assert (done.returncode, done.stdout) == (4, "")
    assert "sources.web: none of the 50 records looked at can be decoded" in done.stderr
    assert "no field 'text'; it has 'id', 'txt'" in done.stderr


def test_tokens_are_estimated_by_the_bytes_of_documents_and_not_by_their_number(plan):
    """The largest files do not fit into what is looked at."""
    for number in range(20):
        (plan.parent / f"web/doc-{number}.txt").write_text("x" * (180_000 if number < 2 else 9_000))
    plan.write_text(PLAN.replace("records: lines, files: notes.txt", "files: 'web/doc-*.txt'"))
    tokens = [check(plan, *deep, "--json").document["sources"]["notes"]["tokens"] for deep in ([], ["--deep"])]
    assert 0.98 < tokens[0] / tokens[1] < 1.02


def test_compressed_files_have_an_unknown_number_of_tokens(plan):
    (plan.parent / "notes.txt.gz").write_bytes(gzip.compress(b"nine byte\n" * 100))
    plan.write_text(PLAN.replace("notes.txt", "notes.txt.gz"))
    done = check(plan)
    assert done.returncode == 0
    assert re.search(r"^notes +text .* \? +≈ 10 +≈ 100.0% +-$", done.stdout, re.MULTILINE)


def test_nothing_is_written(plan):
    before = sorted(plan.parent.rglob("*"))
    assert check(plan).returncode == 0
    assert sorted(plan.parent.rglob("*")) == before


# Bytes that a worker takes more than before, for the only record of a file.
WORKER = """
import sys
from pathlib import Path
from stepfs_producer.engine.worker import preload
from stepfs_producer.run.workers.tasks import read, transform
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.sources.listing import list_corpus
from stepfs_producer.sources.listing import Layout
from stepfs_producer.plan.sources import Jsonl, Tokenizer
from stepfs_producer.sources.record import SourceSpec
from stepfs_producer.transforms.tokenizer import load_tokenizer, pinned
from stepfs_producer.transforms.documents import TokenizerSpec, TransformSpec
def peak():  # not of the process that started this one, as getrusage
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
preload(".")
spec, model = SourceSpec("web", Jsonl(sys.argv[1])), dict(zip(("file", "eos"), sys.argv[2:]))
tokenizer = pinned(TokenizerSpec(Tokenizer(kind="huggingface" if model else "bytes", **model)))
load_tokenizer(tokenizer)
task = Layout(spec, list_corpus(spec)).task(BlockAddress(0, 0, 0))
before = peak()
head, _ = transform(TransformSpec(spec.source, tokenizer), 0, 0, "web", read(spec, task)[1], 0, 1)
assert head.heads.tokens[0] > 0, head
print(peak() - before << 10)
"""


@pytest.mark.parametrize("kind", [pytest.param("model", marks=pytest.mark.nightly), "bytes"])
def test_the_memory_of_a_longest_text_is_what_a_worker_takes_for_it(tmp_path: Path, kind: str) -> None:
    size = 2 << 20 if kind == "model" else 8 << 20
    text = json.dumps({"text": ("a line of words, 12 and more; " * (size // 30 + 1))[:size]})
    (tmp_path / "web.jsonl").write_text(text + "\n")
    tokenizer: tuple[str, ...] = ()
    plan = {
        "output": {"mesh": "dp=1", "sequence_length": 64},
        "sources": {"web": {"format": "jsonl", "files": "web.jsonl"}},
    }
    if kind == "model":
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.train_from_iterator(
            [text[:1000]], trainers.BpeTrainer(special_tokens=["<|endoftext|>"], show_progress=False)
        )
        model.save(str(tmp_path / "tokenizer.json"))
        tokenizer = str(tmp_path / "tokenizer.json"), "<|endoftext|>"
        plan["tokenizer"] = {"kind": "huggingface", "file": "tokenizer.json", "eos": "<|endoftext|>"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    said = check(tmp_path / "plan.yaml", "--json").document
    of_worker = (said["memory_bytes_longest"] - said["memory_bytes"]) / usable_cpus()
    words = [sys.executable, "-c", WORKER, tmp_path / "web.jsonl", *tokenizer]
    took = int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert of_worker / 2 < took < of_worker * 1.25


def test_the_memory_of_a_line_that_is_longer_than_the_sample_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text(json.dumps({"text": "x" * (16 << 20)}) + "\n")
    plan = {
        "output": {"mesh": "dp=1", "sequence_length": 64},
        "sources": {"web": {"format": "jsonl", "files": "web.jsonl"}},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    said = check(tmp_path / "plan.yaml", "--json").document
    of_worker = (said["memory_bytes_longest"] - said["memory_bytes"]) / usable_cpus()
    assert of_worker > 150 << 20, "177 MiB measured"


PAGE = """
import sys
from pathlib import Path
from stepfs_producer.engine.worker import preload
from stepfs_producer.run.workers.tasks import read
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.plan.sources import Parquet
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.sources.record import SourceSpec
def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
preload(".")
import pyarrow.parquet
spec = SourceSpec("pictures", Parquet(sys.argv[1], transform="module:function"))
task = Layout(spec, list_corpus(spec)).task(BlockAddress(0, 0, 0))
before = peak()
assert read(spec, task)[1]
print(peak() - before << 10)
"""


@pytest.mark.nightly
def test_the_memory_of_a_largest_page_is_what_a_worker_takes_to_read_it(tmp_path: Path) -> None:
    pictures = pa.array([os.urandom(1 << 20) for _ in range(48)], pa.binary())
    pq.write_table(
        pa.table({"picture": pictures}), tmp_path / "p.parquet", data_page_size=1 << 30, use_dictionary=False
    )
    plan = {
        "output": {"mesh": "dp=1", "sequence_length": 64},
        "sources": {"pictures": {"format": "parquet", "files": "p.parquet", "transform": "own:of"}},
    }
    (tmp_path / "own.py").write_text("def of(record):\n    return [1, 2, 3]\n")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    said = check(tmp_path / "plan.yaml", "--json").document
    of_worker = (said["memory_bytes_longest"] - said["memory_bytes"]) / usable_cpus()
    words = [sys.executable, "-c", PAGE, tmp_path / "p.parquet"]
    took = int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert of_worker / 2 < took < of_worker * 1.25


def test_a_source_whose_records_give_nothing_is_named(plan):
    (plan.parent / "droppers.py").write_text("def nothing(record):\n    return None\n")
    plan.write_text(PLAN.replace("epochs: 2,", "epochs: 2, transform: droppers:nothing,"))
    lines = check(plan).stdout.splitlines()
    (warning,) = [line for line in lines if line.startswith("note: source notes: none of the ")]
    assert "a run would end with an error" in warning
