"""`stepfs-produce tokenize`: one tokenisation for many mixes, in the files of Megatron; and lakes of compact arrays."""

from __future__ import annotations

import json
from functools import partial

import json_schemas
import pytest
import torch
from lakes import produce

from stepfs import Lake, StepDataset
from stepfs_producer.run import tokenize as tokenising

tokenize = partial(produce, "tokenize")

PLAN = """
output: {{mesh: "dp=1", sequence_length: 64, arrays: {arrays}}}
defaults: {{epochs: 1, shuffle: none}}
sources:
  words: {source}
"""
JSONL = '{format: jsonl, files: "words/*.jsonl", on_error: skip}'


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "words").mkdir()
    for file in range(3):
        lines = [json.dumps({"text": f"document {file}.{number} " + "é" * (number % 90)}) for number in range(40)]
        (tmp_path / f"words/{file}.jsonl").write_text("\n".join([*lines, "no json"]) + "\n")
    return written(tmp_path / "plan.yaml", JSONL)


def written(path, source, arrays="full"):
    path.write_text(PLAN.format(source=source, arrays=arrays))
    return path


def steps_of(plan, name):
    url = f"file://{plan.parent}/{name}"
    done = produce("run", plan, url, "--workers", 1)
    assert done.returncode == 0, done.stderr
    with Lake(url) as lake:
        steps, stored = lake.next_step, sum(len(lake.read(step, 0)) for step in range(lake.next_step))
    items = StepDataset(url, rank=0, start=0, stop=steps)
    return [items[step] for step in range(steps)], stored


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_plan_reads_what_it_would_tokenise_itself(plan):
    done = tokenize(plan, plan.parent / "ids", "--source", "words", "--workers", 1, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    json_schemas.check("produce-tokenize", done.document)
    assert {name: done.document[name] for name in ("documents", "token_bytes", "skipped")} == {
        "documents": 120,
        "token_bytes": 2,
        "skipped": 3,
    }
    assert done.document["first_skipped"].startswith("0/0.jsonl at ")
    again = written(plan.parent / "again.yaml", "{format: megatron, files: ids}")
    (texts, _), (ids, _) = steps_of(plan, "texts"), steps_of(again, "ids-lake")
    assert len(texts) > 10
    assert [step["input_ids"].tolist() for step in ids] == [step["input_ids"].tolist() for step in texts]


def test_compact_arrays_are_read_as_full_ones_and_take_a_tenth(plan):
    compact = written(plan.parent / "compact.yaml", JSONL, "compact")
    (full, stored), (expanded, small) = steps_of(plan, "full"), steps_of(compact, "compact")
    assert [same(one, other) for one, other in zip(expanded, full, strict=True)] == [True] * len(full)
    assert small < stored / 2  # rows of 64 tokens: headers and spans are most of it


@pytest.mark.parametrize(
    ("source", "name", "code", "said"),
    [
        (JSONL, "word", 2, "the plan has no source 'word'; did you mean 'words'?"),
        ("{format: jsonl, files: gone.jsonl}", "words", 3, "gone.jsonl"),
        (JSONL.replace(", on_error: skip", ""), "words", 5, "repair the file, or write on_error: skip"),
        ('{format: jsonl, files: "words/*.jsonl", tokens_field: ids, mask_field: m}', "words", 2, "has mask_field"),
    ],
)
def test_a_source_that_cannot_be_tokenised_leaves_nothing(plan, source, name, code, said):
    written(plan, source)
    before = sorted(plan.parent.rglob("*"))
    done = tokenize(plan, plan.parent / "ids", "--source", name, "--workers", 1)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(plan.parent.rglob("*")) == before


def test_a_full_disk_is_said_at_once(plan, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    done = tokenize(plan, plan.parent / "ids", "--source", "words", "--workers", 1)
    assert (done.returncode, "No space left on device; nothing of this was left there" in done.stderr) == (4, True)
    assert not list(plan.parent.glob("*ids*"))


def test_files_that_are_there_are_kept(plan, monkeypatch):
    (plan.parent / "ids.idx").write_text("of others")
    done = tokenize(plan, plan.parent / "ids", "--source", "words", "--workers", 1)
    assert (done.returncode, done.stderr) == (
        4,
        f"stepfs-produce: {plan.parent}/ids.idx exists; name another OUT, or remove it\n",
    )
    assert [path.name for path in plan.parent.glob("ids*")] == ["ids.idx"]
    (plan.parent / "ids.idx").unlink()
    monkeypatch.setattr(tokenising, "index_of", lambda *_: (plan.parent / "ids.bin").write_bytes(b"of others") and b"")
    raced = tokenize(plan, plan.parent / "ids", "--source", "words", "--workers", 1)
    assert (raced.returncode, "File exists" in raced.stderr) == (4, True), "two at once"
    assert (plan.parent / "ids.bin").read_bytes() == b"of others"
    assert [path.name for path in plan.parent.glob("*ids*")] == ["ids.bin"]
    nowhere = tokenize(plan, plan.parent / "none/ids", "--source", "words", "--workers", 1)
    assert (nowhere.returncode, "make it first" in nowhere.stderr) == (2, True)
