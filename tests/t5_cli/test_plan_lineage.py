"""`stepfs-produce lineage` of a small planned lake: its places, its words for what is missing, every kind of payload."""

from __future__ import annotations

import shutil
from pathlib import Path

import json_schemas
import pytest
from lakes import stepfs
from planned_lake import (
    ONE_PLAN_STEPS,
    behind_the_head,
    lake_of,
    made,
    one_line,
    produce,
    replayed,
    spans,
    texts,
    write_plan,
)

from stepfs_producer import Producer


def test_the_document_is_the_one_of_the_page_and_the_lines_say_the_same(here: Path) -> None:
    document = produce("lineage", lake_of(here), "--step", 3, "--json").document
    json_schemas.check("produce-lineage", document)
    assert sum(one["share"] for one in document["sources"].values()) == pytest.approx(1)
    assert document["tokens"] == sum(one["tokens"] for one in document["spans"])
    assert {(one["rank"], one["micro"]) for one in document["spans"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    shown = produce("lineage", lake_of(here), "--step", 3)
    assert document["plan"] in shown.out
    assert all(f"0/{name}" in shown.out for name in ("prose.txt", "0.jsonl"))
    text = produce("lineage", lake_of(here), "--step", 3, "--rank", "1:0", "--text", "--plan-dir", here)
    assert "    prose " in text.out
    assert "no text" not in text.out


def test_a_token_has_the_span_around_it(here: Path) -> None:
    whole = spans(here, "--step", 2, "--rank", "1")
    assert {one["rank"] for one in whole} == {1}
    for span in whole:
        place = f"1:{span['micro']}:{span['start'] + span['tokens'] - 1}"
        assert spans(here, "--step", 2, "--rank", place) == [span]
    ends = {one["start"] + one["tokens"] for one in whole if one["micro"] == 0}
    padding = next(
        end for end in sorted(ends) if end not in {one["start"] for one in whole if one["micro"] == 0} | {256}
    )
    one_line(produce("lineage", lake_of(here), "--step", 2, "--rank", f"1:0:{padding}"), 3, "is padding")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--rank", "1:0:256"], 2, "token 256: a micro-batch has 256, from 0 on"),
        (["--rank", "1:2"], 2, "micro-batch 2: the file has 2, from 0 on"),
        (["--rank", "2"], 2, "--rank 2: the lake has 2 data ranks, from 0 on"),
        (["--rank", "one"], 2, "--rank 'one': write a rank"),
        (["--step", "99"], 3, "step 99 is not in the lake (steps 0 to 11 are)"),
    ],
)
def test_what_is_beyond_is_said_to_be(here: Path, arguments, code, words) -> None:
    one_line(produce("lineage", lake_of(here), *arguments), code, words)


def test_a_reclaimed_step_has_no_lineage(here: Path) -> None:
    url = lake_of(here)
    record = spans(here, "--step", 0)[0]
    assert stepfs("checkpoint", url, "--group", "run", "--new-group", 6).code == 0
    assert stepfs("reclaim", url, "--grace", "0s").code == 0
    one_line(produce("lineage", url, "--step", 2), 3, "step 2 is not in the lake (steps 6 to 11 are)")
    words = [
        "--source", record["source"], "--file", record["file"], "--record", record["record"], "--plan-dir", here,
    ]  # fmt: skip
    one_line(produce("find", url, *words), 3, "no step from 6 on holds it; those before were reclaimed")
    one_line(replayed(here, steps="2:8"), 3, "step 2 is not in the lake")
    refused = replayed(here, steps="6:12")
    assert (refused.code, "the position before it is not left" in refused.err) == (3, True), refused.err
    first = int(refused.err.split("the first that can is ")[1])
    assert replayed(here, steps=f"{first}:12").code == 0


@pytest.mark.parametrize("ext", [".npy", ".bin"])
def test_a_lake_without_spans_says_so(tmp_path: Path, ext: str) -> None:
    plan = write_plan(tmp_path, ext)
    plan.write_text(plan.read_text() + "defaults: {shuffle: none}\n")
    url = made(tmp_path, steps=1)
    one_line(produce("lineage", url), 2, "lineage is in the .safetensors, .pt and .tar files")
    words = ["--source", "prose", "--file", "prose.txt", "--record", 0, "--plan-dir", tmp_path]
    one_line(produce("find", url, *words), 2, "which has no room for spans")


@pytest.mark.parametrize("ext", [".pt", ".tar"])
def test_other_formats_with_spans_have_lineage(tmp_path: Path, ext: str, original: Path) -> None:
    made(tmp_path, ext=ext, steps=1)
    assert spans(tmp_path, "--step", 0) == spans(original, "--step", 0)
    shown = produce("lineage", lake_of(tmp_path), "--text", "--plan-dir", tmp_path, "--json").document
    assert all(one["text"] for one in shown["spans"])


def test_files_of_micro_batches_have_the_same_past(tmp_path: Path, original: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("micro_batches: 2", "micro_batches: 2, files: micro_batches"))
    made(tmp_path, steps=3)
    here, whole = spans(tmp_path, "--step", 2), spans(original, "--step", 2)
    assert [{**one, "slice": 0} for one in here] == [{**one, "slice": 0} for one in whole]
    assert {one["slice"] for one in here} == {0, 1, 2, 3}
    assert spans(tmp_path, "--step", 2, "--rank", "1:1") == [one for one in here if one["slice"] == 3]
    one_line(produce("lineage", lake_of(tmp_path), "--rank", "1:2"), 2, "micro-batch 2: a rank has 2, from 0 on")
    last = here[-1]
    words = [
        "--source", last["source"], "--file", last["file"], "--record", last["record"], "--plan-dir", tmp_path,
    ]  # fmt: skip
    found = produce("find", lake_of(tmp_path), *words, "--json").document["found"]
    assert (2, 1, last["micro"], last["start"]) in {
        (one["step"], one["rank"], one["micro"], one["start"]) for one in found
    }
    assert replayed(tmp_path, "--ranks", 1, steps="0:3").code == 0
    assert replayed(tmp_path, "--to", tmp_path / "out", "--ranks", 1, steps="1:2").code == 0
    written = [path.name for path in sorted((tmp_path / "out/step-000000001").iterdir())]
    assert written == [f"rank-00001.micro-{micro:04}.safetensors" for micro in range(2)]


def test_a_producer_of_ones_own_has_no_lineage(tmp_path: Path, file_url: str) -> None:
    assert stepfs("init", file_url, "--slices", 1, "--ext", ".bin").code == 0
    with Producer(file_url, producer_id="mine") as producer:
        producer.append([b"bytes"], position=1)
    one_line(produce("lineage", file_url), 2, "has no room for spans")
    one_line(
        produce("find", file_url, "--source", "a", "--file", "b", "--record", 0),
        3,
        "the lake has no source 'a'",
    )
    one_line(produce("replay", file_url, "--steps", "0:1"), 4, "a plan did not make them")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_text(path.read_text()[:-9]), "is shorter than when this plan began"),
        (lambda path: path.write_text("PROSE" + path.read_text()[5:]), "begins otherwise"),
        (lambda path: path.write_bytes(behind_the_head(path)), "other tokens come of 0/prose.txt"),
    ],
    ids=["gone", "shorter", "beginning", "unnoticed"],
)
def test_another_text_is_never_shown(here: Path, change, why: str) -> None:
    shown = [one for step in range(ONE_PLAN_STEPS) for one in texts(here, step) if one["source"] == "prose"]
    assert all(one["text"] for one in shown)
    change(here / "prose.txt")
    after = [one for step in range(ONE_PLAN_STEPS) for one in texts(here, step)]
    place = next(one for one in spans(here, "--step", 0) if one["source"] == "prose")
    rank = f"{place['rank']}:{place['micro']}:{place['start']}"
    words = ["--step", 0, "--rank", rank, "--text", "--plan-dir", here]
    shown_alone = produce("lineage", lake_of(here), *words)
    if "no text: " not in shown_alone.out:
        assert shown_alone.code == 0
    else:
        one_line(shown_alone, 3, "--text: the text of the record is not at hand: ")
        assert why in shown_alone.err
        assert "0/prose.txt" in shown_alone.out
    assert {one["text"] for one in after if one["source"] == "prose"} <= {None} | {one["text"] for one in shown}
    said = {one["problem"] for one in after if one["source"] == "prose" and one["text"] is None}
    assert said
    assert all(why in one for one in said), said
    assert all(one["text"] for one in after if one["source"] == "code")


def test_a_lost_listing_and_a_lost_plan_are_named(here: Path) -> None:
    url = lake_of(here)
    record = next(one for one in spans(here, "--step", 3) if one["source"] == "prose")
    words = ["--source", "prose", "--file", "prose.txt", "--record", record["record"], "--plan-dir", here]
    [plans] = (here / "lake").glob("*/plans")
    for path in plans.iterdir():
        if path.is_file():
            path.unlink()
    [shown] = {one["problem"] for one in texts(here, 3)}
    assert "the text of the plan is not in the lake" in shown
    one_line(produce("find", url, *words), 3, "the plan of source prose is not in the lake; restore")
    one_line(replayed(here), 3, "is not in the lake; restore its object plans/")
    shutil.rmtree(next((here / "lake").glob("*/sources")))
    numbered = produce("lineage", url, "--step", 3, "--json")
    assert {one["file"] for one in numbered.document["spans"]} == {None}
    assert numbered.err.count("the list of files of source") == 2
    assert "#0" in produce("lineage", url, "--step", 3).out
    one_line(produce("find", url, *words), 3, "the list of files of source prose is not in the lake; restore")


def test_from_another_directory_than_the_plans_the_way_there_is_named(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, said = (
        lake_of(here),
        f"prose.txt: no such file in {tmp_path}; restore it, or name the directory that the plan's",
    )
    one_line(produce("find", url, "--source", "prose", "--file", "prose.txt", "--record", 0), 3, said)
    one_line(produce("replay", url, "--steps", "0:1"), 3, "was in by --plan-dir")
    alone = produce("lineage", url, "--step", 3, "--text")
    one_line(alone, 3, "--text: the text of any of the ")
    assert said in alone.out
