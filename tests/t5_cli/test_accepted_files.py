"""A corpus that loses a file, gets another in place of one, and has one cut short: the run ends, and the counts add up."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from committed import committed
from lakes import Ended, produce

from spans_audit import by_record, joined, pieces_of

PLAN = """\
version: 1
output: {mesh: "dp=2", sequence_length: 4096, micro_batch_tokens: 65536}
sources: {web: {format: FORMAT, files: web/, epochs: 1, shuffle: {block: 256KiB}, on_error: {do: skip, file: skip}}}
until: {exhausted: all, last: pad}
"""
RECORDS = 1500


def texts(name: str, version: int = 1, records: int = RECORDS) -> list[str]:
    return [f"{name} {version} {number} " + "x" * (number * 37 % 2000) for number in range(records)]


def written(path: Path, lines: list[str]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": lines}), path, row_group_size=100)
        return
    data = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


@pytest.fixture(params=["jsonl", pytest.param("parquet", marks=pytest.mark.nightly)])
def plan(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    web = tmp_path / "web"
    web.mkdir()
    for name in "abcd":
        written(web / f"{name}.{request.param}", texts(name))
    if request.param == "jsonl":
        written(web / "e.jsonl.gz", texts("e"))
        data = (web / "e.jsonl.gz").read_bytes()
        (web / "e.jsonl.gz").write_bytes(data[: len(data) // 2])
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("FORMAT", request.param))
    return path


def run(plan: Path, lake: str, *more: object) -> Ended:
    return produce("run", plan, lake, "--workers", 2, "--json", *more)


def documents(lake: str) -> Counter[tuple[str, str, int]]:
    """(file, version, number) of each record: spans of one record joined again."""
    found: Counter[tuple[str, str, int]] = Counter()
    payloads = (payload for _, files in committed(lake) for payload in files)
    for pieces in by_record(piece for payload in payloads for piece in pieces_of(".safetensors", payload)).values():
        ids = joined(pieces)
        assert ids is not None, "no record is there twice"
        text = bytes(token for token in ids if token < 256).decode()
        name, version, number, xs = text.split(" ")
        assert xs == "x" * (int(number) * 37 % 2000), "whole"
        found[name, version, int(number)] += 1
    return found


def test_the_counts_add_up(plan: Path, file_url: str) -> None:
    web, kind = plan.parent / "web", "." + ("parquet" if "parquet" in plan.read_text() else "jsonl")
    assert run(plan, file_url, "--limit-steps", 25).code == 0
    before = documents(file_url)
    spans = {span["file"]: (step, span) for step in (5, 12) for span in spans_in(file_url, step)}
    assert 0 < sum(before.values()) < 4 * RECORDS
    (web / f"b{kind}").unlink()
    written(web / f"c{kind}", texts("c", 2, 900))
    refused = run(plan, file_url)
    assert (refused.code, refused.err.count("\n")) == (4, 1), refused.err
    assert f"the file 0/b{kind} is gone; restore it, or run again with --accept-changes" in refused.err
    compared = produce("check", plan, file_url, "--accept-changes")
    assert f"source web: 0/b{kind} is gone: it gives nothing from here on" in compared.out + compared.err
    accepted = run(plan, file_url, "--accept-changes", "--limit-steps", 27)
    assert accepted.code == 0, accepted.err
    assert f"0/b{kind} is gone: it gives nothing from here on" in accepted.err
    assert f"0/c{kind} is another: it is read as it is now" in accepted.err
    left_out = "source web: the rest of the block that was begun, at most " in accepted.err
    assert left_out == (kind == ".parquet"), "with jsonl it was another file's"
    for steps in ("0:5", "20:25"):
        replayed = produce("replay", file_url, "--steps", steps, "--plan-dir", plan.parent, "--workers", 1)
        assert (replayed.code, "restore it" in replayed.err) == (4, True), replayed.err
    done = run(plan, file_url)
    assert done.code == 0, done.err
    replayed = produce("replay", file_url, "--steps", "25:31", "--plan-dir", plan.parent, "--workers", 1)
    assert replayed.code == 0, replayed.out + replayed.err
    after = documents(file_url)
    assert before <= after
    assert set(after.values()) == {1}
    of = Counter((name, version) for name, version, _ in after)
    assert of["d", "1"] >= RECORDS - 400, "at most the block that was begun is left out"
    assert of["b", "1"] == sum(name == "b" for name, _, _ in before)
    assert {version for name, version in of if name == "c"} <= {"1", "2"}
    assert of["c", "2"] > 0
    if kind == ".jsonl":
        assert 0 < of["e", "1"] < RECORDS
    for name, (step, span) in spans.items():
        assert step in steps_with(plan, file_url, name, span["record"]), "also of what is gone, or another now"
    said = done.document["sources"]["web"]
    total = sum(one["records"] for one in (json.loads(accepted.stdout)["sources"]["web"], said))
    assert sum(after.values()) - sum(before.values()) in range(total - 2, total + 1)


def spans_in(lake: str, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = produce("lineage", lake, "--step", step, "--json").document["spans"]
    return found


def steps_with(plan: Path, lake: str, file: str, record: int) -> list[int]:
    where = ("--source", "web", "--file", file, "--record", record, "--plan-dir", plan.parent, "--json")
    found = produce("find", lake, *where)
    assert found.code == 0, found.err
    return [one["step"] for one in found.document["found"]]


@pytest.mark.nightly
def test_what_was_read_before_files_changed_is_found_in_its_steps(plan: Path, file_url: str) -> None:
    web, kind = plan.parent / "web", "." + ("parquet" if "parquet" in plan.read_text() else "jsonl")
    assert run(plan, file_url, "--limit-steps", 25).code == 0
    spans = [(step, span["file"], span["record"]) for step in range(3, 9) for span in spans_in(file_url, step)]
    (web / f"b{kind}").unlink()
    written(web / f"c{kind}", texts("c", 2, 900))
    assert run(plan, file_url, "--accept-changes", "--limit-steps", 27).code == 0
    for step, file, record in spans[:: max(1, len(spans) // 30)]:
        assert step in steps_with(plan, file_url, file, record)


@pytest.mark.nightly
def test_a_file_that_came_later_is_not_read_and_that_is_said(plan: Path, file_url: str) -> None:
    kind = "parquet" if "parquet" in plan.read_text() else "jsonl"
    assert run(plan, file_url, "--limit-steps", 5).code == 0
    written(plan.parent / f"web/0.{kind}", texts("0"))
    done = run(plan, file_url)
    assert done.code == 0, done.err
    assert f"source web: 0/0.{kind} came after it began, and is not read; name such files in a source" in done.err
    assert {name for name, _, _ in documents(file_url)} <= set("abcde")
