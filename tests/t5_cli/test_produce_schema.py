"""`stepfs-produce text` and `run` record what their slices hold, and refuse a lake that promises something else."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import lakes
import numpy as np
import pytest
from lakes import stepfs, with_schema
from payload_samples import npy
from produced_text import produce, refused
from test_produce_run import PLAN, plan, run

from stepfs_producer import Producer
from stepfs_producer.plan.step import State

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


SAFETENSORS = PLAN.replace(".npy", ".safetensors")
SHAPES = {"input_ids": ["a", "b"], "labels": ["a", "b"], "position_ids": ["a", "b"], "doc_ids": ["a", "b"],
          "cu_seqlens": [None], "cu_seqlens_offsets": [None], "spans": [None, 8]}  # fmt: skip


def schema_with(**other: list) -> str:
    """What the plan makes, in other shapes."""
    dtypes = {"input_ids": "int64", "labels": "int64", "spans": "int64"}
    shapes = {**SHAPES, **other}
    return json.dumps({"arrays": {n: {"dtype": dtypes.get(n, "int32"), "shape": s} for n, s in shapes.items()}})


@pytest.mark.parametrize("command", ["run", "text"])
def test_a_lake_that_promises_other_arrays_is_refused_before_anybody_is_fenced(file_url, plan, corpus, command):
    given = json.dumps({"arrays": {"array": {"dtype": "int32", "shape": [4, None]}}})
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy", "--payload-schema", given).code == 0
    name = "plan" if command == "run" else "text-0-of-1"
    with Producer(file_url, producer_id=name) as healthy:
        done = run(plan, file_url) if command == "run" else produce(file_url, "-i", corpus, *SHAPE)
        refused(
            done, 4, "has 'array' as int32 [4, ", "the lake's schema says int32 [4, ?]", "fork this one with another"
        )
        assert stepfs("status", file_url, "--json").document["producers"][name]["epoch"] == healthy.epoch


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"labels": [1, 1024]}, "has 'labels' as int64 [1, 512], the lake's schema says int64 [1, 1024]"),
        ({"labels": ["a", "a"]}, "has 'labels' as int64 [1, 512], the lake's schema says int64 [a, a]"),
        ({"labels": ["b", "a"]}, "has 'labels' as int64 [1, 512], the lake's schema says int64 [b, a]"),
        ({"spans": [17, 8]}, "has 'spans' as int64 [0, 8], the lake's schema says int64 [17, 8]"),
    ],
)
def test_shapes_that_no_step_of_the_plan_has_are_refused_before_anybody_is_fenced(file_url, plan, shape, says):
    plan.write_text(SAFETENSORS)
    given = schema_with(**shape)
    assert stepfs("init", file_url, "--slices", 2, "--payload-schema", given).code == 0
    for command in (("check", plan, file_url), ("check", plan, file_url, "--accept-changes")):
        refused(lakes.produce(*command), 4, says)
    with Producer(file_url, producer_id="plan") as healthy:
        refused(run(plan, file_url, "--accept-changes"), 4, says)
        assert stepfs("status", file_url, "--json").document["producers"]["plan"]["epoch"] == healthy.epoch


@pytest.mark.parametrize("lake_of", ["schema", "producer"])
def test_another_tokenizer_in_a_lake_is_refused_unless_accepted(file_url, corpus, plan, lake_of):
    assert run(plan, file_url, "--producer-id", "first", "--limit-steps", 1).returncode == 0
    if lake_of == "schema":
        with_schema(file_url, json.dumps({**schema_of(file_url), "tokenizer": {"identity": "bpe-0123"}}))
        says = "the tokenizer of the lake's schema is bpe-0123, and this plan's is bytes"
    else:
        with Producer(file_url, producer_id="other") as other:
            position = {**State("0" * 32, 1, {}, tokenizer="bpe-0123").position()}
            other.append([npy(np.zeros((4, 1, 512), np.int32))] * 2, position=position)
        says = "the tokenizer of producer other is bpe-0123, and this plan's is bytes"
    checked = lakes.produce("check", plan, file_url)
    refused(checked, 4, says, "name another lake, or add --accept-changes")
    refused(run(plan, file_url, "--limit-steps", 1), 4, says, "or add --accept-changes")
    assert "plan" not in stepfs("status", file_url, "--json").document["producers"], "no epoch was taken"
    accepted = run(plan, file_url, "--limit-steps", 1, "--accept-changes")
    assert (accepted.returncode, says in accepted.stderr) == (0, True)
    again = run(plan, file_url, "--limit-steps", 2)
    assert (again.returncode, again.stderr) == (0, ""), "what has begun was accepted"
    text = produce(file_url, "-i", corpus, *SHAPE)
    refused(text, 4, "name another lake")
    assert "--accept-changes" not in text.stderr, "text has no such option"


def test_both_sides_of_a_holdout_do_not_share_a_lake(file_url, plan) -> None:
    plan.write_text(PLAN.replace("files: code/", "files: code/, holdout: 10%"))
    lake = file_url
    assert run(plan, lake, "--limit-steps", 1).returncode == 0
    for lake_of_them in (lake, f"{lake}-fork"):
        if lake_of_them != lake:
            assert stepfs("fork", f"{lake}@1", lake_of_them).code == 0
        for producer in ("plan", "eval"):
            done = run(plan, lake_of_them, "--holdout", "--producer-id", producer, "--accept-changes")
            refused(done, 4, "has produced into this lake without --holdout", "a lake of its own for each side")
        assert "eval" not in stepfs("status", lake_of_them, "--json").document["producers"], "no epoch was taken"
    own = f"{lake}-held-out"
    assert run(plan, own, "--holdout", "--limit-steps", 1).returncode == 0
    refused(run(plan, own, "--producer-id", "train"), 4, "has produced into this lake with --holdout")
    refused(lakes.produce("check", plan, own), 4, "with --holdout")
    assert lakes.produce("check", plan, own, "--holdout").returncode == 0


def test_check_compares_a_lake_without_a_run(file_url, plan) -> None:
    absent = lakes.produce("check", plan, file_url)
    assert (absent.returncode, "not there yet; a run creates it" in absent.stdout) == (0, True)
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    before = stepfs("status", file_url, "--json").document
    fits = lakes.produce("check", plan, file_url, "--json")
    assert fits.document["lake"] == {"url": file_url, "exists": True}
    plan.write_text(PLAN.replace("code: 30", "code: 60"))
    refused(lakes.produce("check", plan, file_url), 4, "mix[0].weights.code: ")
    other = lakes.produce("check", plan, file_url, "--producer-id", "other")
    assert other.returncode == 0, other.stderr
    plan.write_text(PLAN.replace("dp=2", "dp=4"))
    refused(lakes.produce("check", plan, file_url), 4, "not 4")
    assert stepfs("status", file_url, "--json").document == before, "it writes nothing"


def test_a_run_that_cannot_have_its_metrics_port_fences_no_one(file_url, plan) -> None:
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken, Producer(file_url, producer_id="plan") as healthy:
        done = run(plan, file_url, "--metrics-port", taken.getsockname()[1])
        refused(done, 4, "choose another port")
        assert stepfs("status", file_url, "--json").document["producers"]["plan"]["epoch"] == healthy.epoch


def test_a_lake_without_a_schema_gets_none_and_no_check(file_url: str, corpus: Path, plan: Path) -> None:
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy").code == 0
    assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    assert produce(file_url, "-i", corpus, *SHAPE).returncode == 0
    assert stepfs("ls", file_url, "--json").document["payload_schema"] is None
    with Producer(file_url, producer_id="other") as producer:
        producer.append([b"raw"] * 2, position=0)
