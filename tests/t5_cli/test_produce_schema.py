"""`stepfs-produce text` and `run` record what their slices hold, and refuse a lake that promises something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lakes import stepfs, with_schema
from produced_text import produce, refused
from test_produce_run import PLAN, plan, run

from stepfs_producer import Producer

__all__ = ["plan"]  # fixtures

SHAPE = ["--slices", 2, "--seq-len", 64, "--batch-size", 3, "--limit-steps", 2]


def schema_of(lake: str) -> dict:
    found = stepfs("ls", lake, "--json").document["payload_schema"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("ext", [".safetensors", ".npy", ".bin", ".tar"])
def test_text_records_its_arrays_and_show_undoes_its_ids(file_url: str, corpus: Path, ext: str) -> None:
    assert produce(file_url, "-i", corpus, *SHAPE, "--ext", ext).returncode == 0
    schema = schema_of(file_url)
    assert (schema["format"], "binding" in schema) == (ext[1:], False)
    assert schema["tokenizer"] == {
        "kind": "bytes", "identity": "bytes", "vocabulary": 258, "eos": 256, "pad": 257,
    }  # fmt: skip
    shown = stepfs("show", file_url, "--step", 0, "--json")
    if ext == ".tar":
        assert "arrays" not in schema
        assert shown.code == 2
        return
    assert shown.document["text"].startswith("document 1 says hello\ndocument 1 says hello\n")
    assert stepfs("verify", file_url, "--content").code == 0
    shapes = {name: array["shape"] for name, array in schema["arrays"].items()}
    rows = {
        ".safetensors": ("labels", [3, 64]),
        ".npy": ("array", [4, 3, 64]),
        ".bin": ("input_ids", [3, 64]),
    }
    name, shape = rows[ext]
    assert shapes[name] == shape


def test_a_run_records_its_arrays_and_says_of_its_own_that_they_are(file_url: str, plan: Path) -> None:
    plan.write_text(PLAN.replace(".npy", ".safetensors"))
    assert run(plan, file_url, "--limit-steps", 3).returncode == 0
    schema = schema_of(file_url)
    assert schema["arrays"]["labels"] == {"dtype": "int64", "shape": ["micro", "tokens"]}
    assert (schema["tokenizer"]["kind"], schema["tokenizer"]["eos"]) == ("bytes", 256)
    assert stepfs("verify", file_url, "--content").code == 0
    text = stepfs("show", file_url, "--step", 0, "--json").document["text"]
    assert "prose " in text or "code " in text
    wider = PLAN.replace(".npy", ".safetensors").replace("micro_batch_tokens: 512", "micro_batch_tokens: 1024")
    plan.write_text(wider)
    changed = run(plan, file_url, "--limit-steps", 5, "--accept-changes")
    assert (changed.returncode, changed.stderr) == (0, ""), "a plan may change at a step"


@pytest.mark.parametrize("command", ["run", "text"])
def test_a_lake_that_promises_other_arrays_is_refused_before_anybody_is_fenced(file_url, plan, corpus, command):
    given = json.dumps({"arrays": {"array": {"dtype": "int32", "shape": [4, None]}}})
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy", "--payload-schema", given).code == 0
    name = "plan" if command == "run" else "text-0-of-1"
    with Producer(file_url, producer_id=name) as healthy:
        done = run(plan, file_url) if command == "run" else produce(file_url, "-i", corpus, *SHAPE)
        refused(done, 4, "its schema says 'array' is int32 [4, ?], not int32 [4, ", "fork this one with another")
        assert stepfs("status", file_url, "--json").document["producers"][name]["epoch"] == healthy.epoch


def test_another_tokenizer_in_a_lake_is_told(file_url: str, corpus: Path) -> None:
    assert produce(file_url, "-i", corpus, *SHAPE, "--ext", ".npy").returncode == 0
    recorded = schema_of(file_url)
    with_schema(file_url, json.dumps({**recorded, "tokenizer": {"identity": "bpe-0123"}}))
    told = produce(file_url, "-i", corpus, *SHAPE[:-1], 3)
    assert told.returncode == 0
    assert told.stderr == (
        "stepfs-produce: warning: the lake's ids are said to be made with the tokenizer bpe-0123, and these are made with "
        "bytes\n"
    )


def test_a_lake_without_a_schema_gets_none_and_no_check(file_url: str, corpus: Path, plan: Path) -> None:
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy").code == 0
    assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    assert produce(file_url, "-i", corpus, *SHAPE).returncode == 0
    assert stepfs("ls", file_url, "--json").document["payload_schema"] is None
    with Producer(file_url, producer_id="other") as producer:
        producer.append([b"raw"] * 2, position=0)
