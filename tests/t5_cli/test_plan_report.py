"""`stepfs-produce report`: its figures are those of the steps, its page asks for nothing, and nothing of a record is executed."""

from __future__ import annotations

import json
import re
import stat
import time
from pathlib import Path

import chromium
import json_schemas
import numpy as np
import pytest
import trio
from lakes import Ended, commit, stepfs
from planned_lake import one_line, produce

from stepfs.format.node import NodeRecord
from stepfs.lake.fleet import write_node
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store

STEPS = 12
HOSTILE = "no\x1b]0;title\x07 \u202e<script>alert(1)</script><img src=http://far.example/x onerror=alert(2)>"
PLAN = """\
version: 1
output: {mesh: "dp=2", micro_batches: 2, ext: EXT}
stages: [{from: 0, sequence_length: 128}, {from: 6, sequence_length: 256}]
sources:
  <b>code: {format: jsonl, files: code.jsonl, on_error: {do: skip, at_most: 10%}}
  pairs: {format: jsonl, files: pairs.jsonl, pair: {}}
  prose: {format: text, records: lines, files: prose.txt}
mix: {<b>code: 30, pairs: 10, prose: 60}
until: {steps: 40}
"""


def write(directory: Path, ext: str = ".safetensors") -> Path:
    lines = [json.dumps({"text": f"code {number} " + "x" * (number * 37 % 90)}) for number in range(400)]
    lines[7::20] = ['{"text": '] * len(lines[7::20])
    (directory / "code.jsonl").write_text("\n".join(lines) + "\n")
    pairs = [{"prompt": f"{number}? ", "chosen": "yes", "rejected": HOSTILE} for number in range(300)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    (directory / "prose.txt").write_text("".join(f"prose {n} " + "y" * (n * 31 % 320) + "\n" for n in range(900)))
    (directory / "plan.yaml").write_text(PLAN.replace("EXT", ext))
    return directory / "plan.yaml"


def reported(target: object, *arguments: object) -> Ended:
    ended = produce("report", target, *arguments)
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan and its lake of twelve steps in several commits, two groups, and a mount's record."""
    directory = tmp_path_factory.mktemp("made")
    plan, lake = write(directory), f"file://{directory}/lake"
    for steps in (3, 7, STEPS):
        assert produce("run", plan, lake, "--limit-steps", steps, "--workers", 1).code == 0
    for group, step in (("pretrain", 4), ("eval", 9)):
        assert stepfs("checkpoint", lake, "--group", group, "--new-group", step).code == 0

    async def mounted() -> None:
        store = open_store(lake)
        record = NodeRecord("eval", "<i>gpu", "/mnt/run", 7, "0.1.0", STEPS, 10, 125, time.time_ns() // 10**6)
        await write_node(store, await open_lake(store), record)
        await store.aclose()

    trio.run(mounted)
    return directory


def test_of_a_lake_it_finds_in_the_files_what_the_plan_had_meant(made: Path, monkeypatch) -> None:
    monkeypatch.setattr("stepfs_producer.report.figures._SPAN_S_MIN", 0.0)  # it was made within seconds
    of_plan = reported(made / "plan.yaml", "--limit-steps", STEPS, "--json").document
    of_lake = reported(f"file://{made}/lake", "--json", "--capacity", "1G").document
    for document in (of_plan, of_lake):
        json_schemas.check("produce-report", document)
    [planned], [found] = of_plan["contents"], of_lake["contents"]
    assert [one["step"] for one in found["looked"]] == list(range(STEPS))
    for before, after in zip(planned["looked"], found["looked"], strict=True):
        assert (after["fill"], after["slowest"]) == (pytest.approx(before["fill"]), pytest.approx(before["slowest"]))
    for name, source in planned["sources"].items():
        assert {field: found["sources"][name][field] for field in ("tokens", "records", "skipped", "dropped")} == {
            field: source[field] for field in ("tokens", "records", "skipped", "dropped")
        }
        assert found["sources"][name]["lengths"] == source["lengths"]
        assert found["sources"][name]["seen"] == source["tokens"] == sum(one["tokens"][name] for one in found["shares"])
        assert found["shares"][0]["wanted"][name] == pytest.approx(planned["shares"][0]["wanted"][name])
    assert (found["step"], found["steps"], planned["step"]) == (STEPS, 40, 0)
    assert [one["sequence_length"] for one in found["stages"]] == [128, 256]
    reasons = planned["sources"]["<b>code"]["reasons"]
    assert ["code.jsonl at" in reason for reason in reasons] == [True] * 3
    assert found["sources"]["<b>code"]["reasons"] == []
    assert any("--deep" in note for note in of_lake["notes"])
    status = stepfs("status", f"file://{made}/lake", "--json").document
    assert {name: status[name] for name in of_lake["run"]["status"]} == of_lake["run"]["status"]
    assert of_lake["run"]["commits"][-1]["next_step"] == STEPS
    assert of_lake["run"]["forecast"]["free_bytes"] == (1 << 30) - status["live_bytes"]


def test_what_is_learned_is_what_the_labels_say(made: Path) -> None:
    [found] = reported(f"file://{made}/lake", "--json").document["contents"]
    learned: dict[str, int] = {}
    for step in range(STEPS):
        for rank in range(2):
            rows = produce("view", f"file://{made}/lake", "--step", step, "--rank", rank, "--json").document["rows"]
            for one in (one for row in rows for one in row["documents"]):
                ends = sum(part["kind"] == "cut" for part in one["parts"])  # their labels stand here
                learned[one["source"]] = learned.get(one["source"], 0) + one["learned"] + ends
    assert {name: one["learned"] for name, one in found["sources"].items()} == learned


@pytest.mark.parametrize("target", ["plan", "lake"])
def test_a_page_is_private_asks_for_nothing_and_shows_what_a_record_has(
    made: Path, tmp_path: Path, target: str
) -> None:
    out = tmp_path / "r.html"
    out.write_text("<!doctype html>of before")
    out.chmod(0o644)
    ended = reported(made / "plan.yaml" if target == "plan" else f"file://{made}/lake", "--out", out)
    page = out.read_text()
    assert (stat.S_IMODE(out.stat().st_mode), list(tmp_path.iterdir())) == (0o600, [out])
    assert ended.err.startswith(f"stepfs-produce: {out}: ")
    assert "it holds training text\n" in ended.err
    assert "This file holds training text" in page
    shown = r"no\x1b]0;title\x07 \u202e&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=http://far.example/x"
    assert shown in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)
    assert not re.findall(r"<(?:script|img|b>|i>|link|iframe|object|a )", page)
    tags = re.sub(r">[^<]*<", "><", page)
    assert not [
        one for one in re.findall(r"(?:href|src|url|action)[=(][\"']?([^\"')]+)", tags) if not one.startswith("#")
    ]
    assert "default-src 'none'" in page
    assert "&lt;b&gt;code" in page
    assert 18 <= page.count('<div class="row">') <= 20
    assert page.count("<svg ") == (4 if target == "plan" else 6)
    assert len(page.encode()) < 2 << 20
    assert ("Step 0 of 40" if target == "plan" else f"Step {STEPS} of 40") in page
    if target == "lake":
        assert f"Files of {STEPS} steps were looked at: 0, 1, 2," in page
        assert "&lt;i&gt;gpu:/mnt/run (eval)" in page
        assert '<i style="left: 75.0%; right: 0">' in page, "eval holds the steps from 9 on"
    else:
        assert "First bad records of &lt;b&gt;code: 0/code.jsonl at" in page


@pytest.mark.parametrize("target", ["plan.yaml", "lake"])
def test_without_text_there_is_none(made: Path, tmp_path: Path, target: str) -> None:
    where = made / target if target == "plan.yaml" else f"file://{made}/{target}"
    ended = reported(where, "--out", tmp_path / "r.html", "--no-text")
    page = (tmp_path / "r.html").read_text()
    assert "without training text" in ended.err
    assert "training text:" not in page
    assert "<script" not in page.replace("&lt;", "<")
    assert 'class="row"' not in page


@pytest.mark.parametrize("ext", [".npy", ".tar", ".pt"])
def test_every_kind_of_file_has_a_report(tmp_path: Path, ext: str) -> None:
    plan, lake = write(tmp_path, ext), f"file://{tmp_path}/lake"
    if ext == ".npy":
        plan.write_text(plan.read_text().replace("pair: {}", "text_field: prompt"))
    assert produce("run", plan, lake, "--limit-steps", 2, "--workers", 1).code == 0
    [found] = reported(lake, "--json", "--out", tmp_path / "r.html").document["contents"]
    assert [one["fill"] > 0.5 for one in found["looked"]] == [True] * 2
    assert any(one["lengths"] for one in found["sources"].values()) == (ext != ".npy")
    assert 'class="row"' in (tmp_path / "r.html").read_text()


def test_lakes_without_a_plan_without_a_step_and_of_a_fork(made: Path, file_url: str, tmp_path: Path) -> None:
    assert stepfs("init", file_url, "--slices", 3).code == 0
    empty = reported(file_url, "--json", "--out", tmp_path / "r.html").document
    assert (empty["contents"], empty["run"]["commits"], empty["run"]["forecast"]) == ([], [], None)
    commit(file_url, range(3))
    commit(file_url, range(3, 5), producer_id="tok-1")
    bytes_alone = reported(file_url, "--json", "--out", tmp_path / "r.html").document
    assert bytes_alone["contents"] == []
    assert "no plan made these steps" in bytes_alone["notes"][0]
    assert {one["producer"] for one in bytes_alone["run"]["commits"]} == {"tok-0", "tok-1"}
    page = (tmp_path / "r.html").read_text()
    assert (page.count("<svg "), "tok-1</span>" in page) == (2, True)
    fork = f"file://{tmp_path}/fork"
    assert stepfs("fork", f"file://{made}/lake", fork, "--skip", "8:").code == 0
    assert produce("run", made / "plan.yaml", fork, "--limit-steps", 14, "--workers", 1).code == 0
    forked = reported(fork, "--json").document
    assert [one["step"] for one in forked["contents"][0]["looked"]] == [*range(8), 12, 13], (
        "of steps that it shares, the lake's numbers, for their commits are the parent's"
    )
    assert "commits of steps below 8 are in" in forked["notes"][0]
    for name in ("lake", "fork"):
        json_schemas.check("produce-report", {"lake": bytes_alone, "fork": forked}[name])


def test_a_damaged_step_is_named_and_left_out(made: Path, tmp_path: Path) -> None:
    plan, lake = write(tmp_path), f"file://{tmp_path}/lake"
    assert produce("run", plan, lake, "--limit-steps", 3, "--workers", 1).code == 0
    victim = sorted((tmp_path / "lake").glob("*/data/*/*.tgb"))[1]
    body = bytearray(victim.read_bytes())
    body[len(body) // 2] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(body)
    document = reported(lake, "--json").document
    assert [one["step"] for one in document["contents"][0]["looked"]] == [0, 2]
    assert [note.partition(":")[0] for note in document["notes"] if "left out" in note] == ["step 1 left out"]


def test_a_full_disk_and_ctrl_c_leave_what_was_there(made: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "r.html"
    out.write_text("<!doctype html>of before")

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stepfs_producer.report.page.os.fsync", full)
    one_line(
        produce("report", f"file://{made}/lake", "--out", out), 4, "No space left on device; nothing was left there"
    )
    assert (list(tmp_path.iterdir()), out.read_text()) == ([out], "<!doctype html>of before")
    monkeypatch.setattr("stepfs_producer.report.page.os.fsync", interrupted)
    assert produce("report", f"file://{made}/lake", "--out", out).code == 130
    assert (list(tmp_path.iterdir()), out.read_text()) == ([out], "<!doctype html>of before")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["PLAN"], 2, "add --out report.html, or --json"),
        (["PLAN", "--out", "PLAN"], 4, "is there, and is no page; name another file"),
        (["PLAN", "--out", "."], 2, "is no regular file"),
        (["PLAN", "--out", "/nowhere/r.html"], 3, "there is no directory /nowhere"),
        (["PLAN", "--json", "--capacity", "1G"], 2, "--capacity is for lakes"),
        (["LAKE", "--json", "--limit-steps", "3"], 2, "--limit-steps is for plans"),
        (["LAKE", "--json", "--holdout"], 2, "--holdout is for plans"),
        (["LAKE", "--json", "--capacity", "3Q"], 2, "write a number and K, M, G, T or P"),
        (["none.yaml", "--json"], 3, "no such file"),
        (["file:///nowhere", "--json"], 3, "is not a lake"),
    ],
)
def test_wrong_calls_are_told_in_a_line(made: Path, words: list[str], code: int, said: str) -> None:
    named = {"PLAN": str(made / "plan.yaml"), "LAKE": f"file://{made}/lake"}
    one_line(produce("report", *[named.get(word, word) for word in words]), code, said)
    assert (made / "plan.yaml").read_text().startswith("version: 1")


def test_a_plan_with_mistakes_is_told_as_check_tells_it(tmp_path: Path) -> None:
    plan = write(tmp_path)
    plan.write_text(plan.read_text().replace("prose.txt", "none.txt"))
    ended = produce("report", plan, "--out", tmp_path / "r.html")
    assert (ended.code, ended.err) == (3, produce("check", plan).err)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.nightly
def test_a_browser_finds_no_error_no_request_and_no_text_cut_off(made: Path, tmp_path: Path) -> None:
    with chromium.browser(tmp_path / "profile") as browser:
        hostile = tmp_path / "hostile.html"
        hostile.write_text(
            '<p style="width: 900px">wide</p><script>console.log(1)</script><img src="http://127.0.0.1:9/x">'
        )
        browser.open(hostile, width=400)
        assert browser.complaints()
        assert len(browser.requests()) == 2
        assert browser.value(chromium.CUT_OFF)
        for name, target in (("plan", made / "plan.yaml"), ("lake", f"file://{made}/lake")):
            page = tmp_path / f"{name}.html"
            reported(target, "--out", page)
            for width in (1280, 400):
                browser.open(page, width=width, dark=width == 400)
                assert browser.complaints() == []
                assert browser.requests() == [page.as_uri()]
                assert browser.value(chromium.CUT_OFF) == []
                ink, paper = (np.array(_colour(browser, name)) for name in ("color", "backgroundColor"))
                assert (ink.mean() > paper.mean()) == (width == 400)
                assert browser.value("document.querySelectorAll('svg text').length") > 20


def _colour(browser: chromium.Browser, name: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", browser.value(f"getComputedStyle(document.body).{name}"))]
