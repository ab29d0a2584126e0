"""A lake that says what its slices hold: `init` and `fork` record it, `ls`, `status` and `verify --content` use it."""

from __future__ import annotations

import json
from pathlib import Path

import json_schemas
import numpy as np
import pytest
import torch
from lakes import SLICES, stepfs, with_schema, without_schema
from payload_samples import bomb, npy, pt, safetensors

from stepfs.errors import UsageError
from stepfs_producer import Producer

SCHEMA = {"arrays": {"array": {"dtype": "int64", "shape": ["rows", 4]}}, "tokenizer": {"identity": "bytes"}}
STORED = {"version": 1, "format": "npy", **SCHEMA}
LARGE_ROWS = 300_000  # 9.6 MB: slices that no window of verify holds whole


def batch(rows: int = 3) -> list[bytes]:
    return [npy(np.zeros((rows, 4), np.int64))] * SLICES


def commit(url: str, *batches: list[bytes]) -> None:
    with Producer(url, producer_id="p") as producer:
        for number, each in enumerate(batches):
            producer.append(each, position=number)


@pytest.fixture
def lake(file_url: str) -> str:
    made = stepfs("init", file_url, "--slices", SLICES, "--ext", ".npy", "--payload-schema", json.dumps(SCHEMA))
    assert made.code == 0, made.err
    return file_url


def test_ls_and_status_show_what_init_recorded(lake: str, tmp_path: Path) -> None:
    for name, command in (("ls", "ls"), ("status-lake", "status")):
        document = stepfs(command, lake, "--json").document
        json_schemas.check(name, document)
        assert document["payload_schema"] == STORED
    assert "schema    npy: array int64 [rows, 4]; tokenizer bytes\n" in stepfs("status", lake).out
    plain = f"file://{tmp_path / 'plain'}"
    assert stepfs("init", plain, "--slices", 1).code == 0
    assert stepfs("ls", plain, "--json").document["payload_schema"] is None
    assert "schema" not in stepfs("status", plain).out


def test_what_a_producer_appends_is_held_against_it(lake: str) -> None:
    commit(lake, batch(), batch(0))
    with pytest.raises(
        UsageError,
        match=r"payload 1 has 'array' as float32 \[3, 4\], the lake's schema says int64 \[rows, 4\]",
    ):
        commit(lake, [*batch()[:1], npy(np.zeros((3, 4), np.float32)), *batch()[2:]])
    assert stepfs("ls", lake, "--json").document["next_step"] == 2


def test_a_schema_may_come_from_a_file_or_a_sample(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    init = ["init", "--slices", 1, "--ext"]
    assert stepfs(*init, ".npy", f"{file_url}/a", "--payload-schema", tmp_path / "schema.json").code == 0
    assert stepfs("ls", f"{file_url}/a", "--json").document["payload_schema"] == STORED
    sample = tmp_path / "rank-00000.safetensors"
    sample.write_bytes(safetensors(ids=np.zeros((2, 8), np.int64), mask=np.ones(8, np.bool_)))
    made = stepfs(*init, ".safetensors", f"{file_url}/b", "--from-payload", sample)
    assert made.code == 0, made.err
    assert stepfs("ls", f"{file_url}/b", "--json").document["payload_schema"] == {
        "version": 1,
        "format": "safetensors",
        "arrays": {"ids": {"dtype": "int64", "shape": [2, 8]}, "mask": {"dtype": "bool", "shape": [8]}},
    }


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--payload-schema", "{}", "--from-payload", "x"], 2, "not both"),
        (["--payload-schema", "{"], 2, "--payload-schema: is not JSON"),
        (["--payload-schema", '{"version": 9}'], 4, "upgrade stepfs"),
        (["--payload-schema", "absent.json"], 3, "absent.json: no such file"),
        (["--payload-schema", "/"], 4, "/: Is a directory"),
        (["--from-payload", "absent.npy"], 3, "absent.npy: no such file"),
        (["--from-payload", "{raw}"], 2, "is no .npy file (what numpy.save writes): it begins with b'raw'"),
        (["--from-payload", "{object}"], 2, "Python objects"),
        (["--from-payload", "{text}"], 2, 'dtype "<U2" is none of'),
        (["--payload-schema", "{object}"], 2, "is no JSON in UTF-8"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_makes_no_lake(file_url: str, tmp_path: Path, options, code, words) -> None:
    files = {
        "{raw}": b"raw",
        "{object}": npy(np.array([None]), allow_pickle=True),
        "{text}": npy(np.array(["ab"])),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    given = [str(tmp_path / option) if option in files else option for option in options]
    refused = stepfs("init", file_url, "--slices", 1, "--ext", ".npy", *given)
    assert (refused.code, refused.err.count("\n")) == (code, 1), refused.err
    assert words in refused.err
    assert stepfs("ls", file_url).code == 3


def test_verify_checks_every_slice_against_the_schema_also_long_ones(file_url: str) -> None:
    sample = {"ids": {"dtype": "int32", "shape": [None, 4]}}
    schema = json.dumps({"arrays": sample})
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".pt", "--payload-schema", schema).code == 0
    small, large = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(LARGE_ROWS, 4, dtype=torch.int32)
    commit(file_url, [pt({"ids": small}), pt({"ids": large, "sources": ["a"]})])
    fine = stepfs("verify", file_url, "--content", "--json")
    assert (fine.code, fine.document["errors"]) == (0, [])
    without_schema(file_url)
    commit(file_url, [pt({"ids": small.long()}), bomb()], [pt({"ids": large.long()}), b"raw"])
    with_schema(file_url, json.dumps({"version": 1, "format": "pt", "arrays": sample}))
    assert stepfs("verify", file_url).code == 0, "what a slice holds is no damage unless it is asked for"
    found = stepfs("verify", file_url, "--content", "--json")
    assert found.code == 5
    problems = {(one["step"], one["slice"]): one["problem"] for one in found.document["errors"]}
    says = "the lake's schema says int32 [?, 4]"
    assert problems[1, 0] == f"content: has 'ids' as int64 [2, 4], {says}"
    assert "GLOBAL exec " in problems[1, 1]
    assert problems[2, 0] == f"content: has 'ids' as int64 [{LARGE_ROWS}, 4], {says}"
    assert "is no .pt file" in problems[2, 1]
    assert len(problems) == 4


def test_a_fork_has_its_parents_schema_or_the_one_it_is_given(lake: str, tmp_path: Path) -> None:
    commit(lake, batch())
    fork = f"file://{tmp_path / 'fork'}"
    assert stepfs("fork", f"{lake}@1", fork).code == 0
    assert stepfs("ls", fork, "--json").document["payload_schema"] == STORED
    with pytest.raises(UsageError, match=r"is no \.npy file .*b'raw'; append what the schema says"):
        commit(fork, [b"raw"] * SLICES)
    other = '{"arrays": {"array": {"dtype": "float32", "shape": [null]}}}'
    assert stepfs("fork", f"{lake}@1", f"{fork}-2", "--payload-schema", other).code == 0
    found = stepfs("ls", f"{fork}-2", "--json").document["payload_schema"]
    assert found["arrays"] == {"array": {"dtype": "float32", "shape": [None]}}
    assert stepfs("verify", f"{fork}-2", "--content").code == 5, "the parent's steps are other arrays"
    refused = stepfs("fork", f"{lake}@1", f"{fork}-3", "--payload-schema", '{"format": "pt"}')
    assert (refused.code, "the lake's files are .npy" in refused.err) == (2, True)
    assert stepfs("ls", f"{fork}-3").code == 3


def test_a_schema_that_cannot_be_read_hides_no_step(lake: str) -> None:
    commit(lake, batch())
    with_schema(lake, '{"version": 2, "what": "comes"}')
    assert "upgrade stepfs" in stepfs("ls", lake, "--json").document["payload_schema"]["problem"]
    json_schemas.check("ls", stepfs("ls", lake, "--json").document)
    assert "upgrade stepfs" in stepfs("status", lake).out
    assert stepfs("verify", lake).code == 0, "a newer schema is no damage"
    refused = stepfs("verify", lake, "--content")
    assert (refused.code, "upgrade stepfs" in refused.err) == (4, True)
    with_schema(lake, '{"version": 1, "format": 7}')
    assert stepfs("ls", lake).out == "step-000000000\n"
    damaged = stepfs("verify", lake, "--json")
    assert damaged.code == 5
    assert [(one["key"], "format" in one["problem"]) for one in damaged.document["errors"]] == [("lake.msgpack", True)]
