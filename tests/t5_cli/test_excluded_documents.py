"""Documents that must go (`exclude`): counted and gone from the next step on, whoever makes it, and made again as they were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from committed import committed
from finished import ran
from lakes import Ended, produce, stepfs
from ray_nodes import RAY_PYTHON, cluster

from spans_audit import by_record, joined, pieces_of
from stepfs_producer.run.plan_changes import _edit
from stepfs_producer.run.prepare import plan_at

pytestmark = pytest.mark.timeout(300)
DOCUMENTS = 120
PLAN = """\
version: 1
output: {mesh: "dp=2", sequence_length: 64, micro_batches: 2}
sources:
  web:  {format: jsonl, files: web.jsonl, epochs: 2, holdout: 10%}
  same: {format: text, records: lines, files: web.txt, epochs: 2}
until: {last: pad}
"""
TEXTS = [f"doc {n} " + "x" * (n * 37 % 200) for n in range(DOCUMENTS)]
LINES = [json.dumps({"text": text}) + "\n" for text in TEXTS]


def record(n: int, source: str = "web") -> int:
    """Where the document begins in its file."""
    lines = LINES if source == "web" else [text + "\n" for text in TEXTS]
    return sum(map(len, lines[:n]))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "web.jsonl").write_text("".join(LINES))
    (tmp_path / "web.txt").write_text("\n".join(TEXTS) + "\n")
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def exclude(plan: Path, *entries: dict[str, object]) -> None:
    (plan.parent / "out.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    plan.write_text(PLAN + "exclude: out.jsonl\n")


def by_key(n: int) -> dict[str, object]:
    return {"source": "web", "file": "0/web.jsonl", "record": record(n), "tokens": 9}  # as a span of `lineage` has it


def by_hash(n: int) -> dict[str, object]:
    return {"sha256": hashlib.sha256(TEXTS[n].encode()).hexdigest()}


def run(plan: Path, lake: str, *more: object) -> Ended:
    return produce("run", plan, lake, "--workers", 2, "--json", *more)


def drawn(lake: str, first: int = 0) -> dict[tuple[str, int], list[list[int] | None]]:
    """(source, record) → its tokens in each epoch; None: some of them are missing, or there twice."""
    pieces = [
        piece for _, files in committed(lake)[first:] for file in files for piece in pieces_of(".safetensors", file)
    ]
    found: dict[tuple[str, int], list[list[int] | None]] = {}
    for (_, (source, _, offset)), of_record in sorted(by_record(pieces).items()):
        found.setdefault((source, offset), []).append(joined(of_record))
    return found


def test_documents_go_by_key_and_by_hash_and_are_counted(plan: Path, file_url: str) -> None:
    exclude(plan, by_key(5), by_hash(7), by_hash(DOCUMENTS - 1))
    checked = produce("check", plan, "--deep", "--json")
    assert checked.returncode == 0, checked.stderr
    looked_at = {name: one["excluded"] for name, one in checked.document["sources"].items()}
    assert looked_at == {"web": 3, "same": 2}
    assert not [one for one in checked.document["warnings"] if one.startswith("exclude:")]
    done = run(plan, file_url)
    assert done.returncode == 0, done.stderr
    assert {name: one["excluded"] for name, one in done.document["sources"].items()} == {"web": 6, "same": 4}
    found = drawn(file_url)
    assert (
        not {
            ("web", record(5)),
            *((source, record(n, source)) for n in (7, DOCUMENTS - 1) for source in ("web", "same")),
        }
        & found.keys()
    )
    assert ("same", record(5, "same")) in found, "a key is of one source"
    of_text = {offset: times for (source, offset), times in found.items() if source == "same"}
    assert len(of_text) == DOCUMENTS - 2
    assert all(
        times == [[*TEXTS[n].encode(), 256]] * 2 for n in range(DOCUMENTS) if (times := of_text.get(record(n, "same")))
    )
    shown = stepfs("status", file_url, "--json").document["producers"]["plan"]["plan"]["sources"]
    told = sum(one["excluded"] for one in shown.values())
    assert 0 < told <= 10, "those behind the last samples stand in no position"
    assert "EXCLUDED" in stepfs("status", file_url).stdout


def test_a_running_lake_leaves_them_out_from_the_next_step_on_and_is_made_again(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 12).returncode == 0
    before = drawn(file_url)
    gone = [n for n in range(DOCUMENTS) if n % 3 == 0]
    exclude(plan, *(entry for n in gone for entry in (by_key(n), by_hash(n))))
    refused = run(plan, file_url)
    assert refused.returncode == 4
    assert "  exclude: 0 documents → 80, 80 of them new\nadd --accept-changes" in refused.stderr
    done = run(plan, file_url, "--accept-changes", "--limit-steps", 30)
    assert done.returncode == 0, done.stderr
    after = drawn(file_url, 12)
    assert not [n for n in gone for source in ("web", "same") if (source, record(n, source)) in after]
    kept = {(source, record(n, source)): n for n in range(DOCUMENTS) if n % 3 for source in ("web", "same")}
    whole = drawn(file_url)
    for key, times in whole.items():
        if key in kept:
            assert all(ids is not None and ids == [*TEXTS[kept[key]].encode(), 256][: len(ids)] for ids in times)
    exclude(plan, *(by_hash(n) for n in gone[:5]))  # the file is another one now: the lake has that of then
    again = produce("replay", file_url, "--steps", "0:30", "--plan-dir", plan.parent, "--workers", 2)
    assert (again.returncode, again.stdout.endswith("all the same\n")) == (0, True), again.stdout + again.stderr
    n = next(n for n in gone if ("web", record(n)) in before)
    command = ["find", file_url, "--source", "web", "--file", "web.jsonl", "--plan-dir", plan.parent, "--record"]
    assert produce(*command, record(n), "--json").document["found"][0]["step"] < 12, "those that had it are still found"
    later = [produce(*command, record(n)) for n in gone if ("web", record(n)) not in before]
    assert any("epoch 0 of plan: the plan excludes it" in one.stderr for one in later)


def test_a_run_notices_that_its_file_names_others(plan: Path) -> None:
    exclude(plan, by_key(5), by_hash(7))
    place = plan_at(plan)
    assert _edit(place, plan) == ""
    exclude(plan, by_key(5), by_hash(7), by_hash(8))
    assert "was edited: exclude: 2 documents → 3, 1 of them new; this run goes on" in _edit(place, plan)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_document_that_was_begun_ends_where_it_is_excluded(plan: Path, file_url: str, stop: int) -> None:
    settings = "output: {mesh: 'dp=1', sequence_length: 64}\nsources: {web: {format: jsonl, files: web.jsonl, shuffle: none}}\n"
    plan.write_text(settings)
    assert run(plan, file_url, "--limit-steps", stop).returncode == 0
    last = max(piece.address[2] for file in committed(file_url)[-1][1] for piece in pieces_of(".safetensors", file))
    exclude(plan, {"source": "web", "file": "0/web.jsonl", "record": last})
    plan.write_text(f"{settings}exclude: out.jsonl\n")
    done = run(plan, file_url, "--accept-changes", "--limit-steps", stop + 6)
    assert done.returncode == 0, done.stderr
    after = sorted(offset for _, offset in drawn(file_url, stop))
    places = [record(n) for n in range(DOCUMENTS)]
    at = places.index(last) + 1
    assert after == places[at : at + len(after)]
    again = produce("replay", file_url, "--steps", f"0:{stop + 6}", "--plan-dir", plan.parent, "--workers", 1)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.parametrize(
    ("entries", "note"),
    [
        (['{"source": "web", "file": "0/web.jsonl", "record": 1}'], "1 of 1 documents match nothing (web, 0/web.jsonl at 1)"),
        (['{"sha256": "%s"}' % ("0" * 64)], f"1 of 1 documents match nothing ({'0' * 64})"),
        (['{"source": "wed", "file": "0/web.jsonl", "record": 0}'], "1 of 1 documents match nothing (wed, 0/web.jsonl at 0)"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_said(plan: Path, file_url: str, entries: list[str], note: str) -> None:
    exclude(plan, *map(json.loads, entries))
    assert f"note: exclude: {note}\n" in produce("check", plan, "--deep").stdout
    listed = produce("check", plan)
    assert ("match nothing" in listed.stdout) == ("wed" in note), "without --deep files alone are looked at"
    done = run(plan, file_url, "--limit-steps", 3)
    assert "exclude: none of its 1 documents was met in 3 steps" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "out.jsonl: no such file; name a file of documents, or remove the key"),
        ("\n", "out.jsonl names 0 documents; name 1 to 100000, or remove the key"),
        ('{"sha256": "abc"}\n', "out.jsonl:1: names no document; write "),
        ('\n{"source": "web", "record": 3}\n', "out.jsonl:2: names no document; write "),
        ('{"source": "web", "file": "0/web.jsonl", "record": -1}\n', "out.jsonl:1: names no document"),
        ("web.jsonl 3\n", "out.jsonl:1: names no document; write "),
    ],
)
def test_a_file_that_names_no_documents_is_refused_by_its_line(plan: Path, content: str | None, message: str) -> None:
    plan.write_text(PLAN + "exclude: out.jsonl\n")
    if content is not None:
        (plan.parent / "out.jsonl").write_text(content)
    for command in (["check", plan], ["run", plan, f"file://{plan.parent}/lake"], ["simulate", plan]):
        ended = produce(*command)
        assert (ended.returncode, ended.stderr.count("\n")) == (3 if content is None else 2, 1), ended.stderr
        assert message in ended.stderr
    assert not (plan.parent / "lake").exists()


@pytest.mark.nightly
def test_workers_of_ray_leave_out_the_same(plan: Path, file_url: str, tmp_path: Path) -> None:
    exclude(plan, *(entry for n in range(0, DOCUMENTS, 2) for entry in (by_key(n), by_hash(n + 1 if n % 4 else n))))
    assert run(plan, file_url).returncode == 0
    other = f"file://{tmp_path}/by-ray"
    with cluster("3") as (address, _):
        main = "from stepfs_producer.cli import main; main()"
        words = ["run", plan, other, "--engine", "ray", "--ray-address", address, "--workers", 2]
        done = ran([str(RAY_PYTHON), "-c", main, *map(str, words)], timeout=200)
        assert done.returncode == 0, done.stderr
    assert [files for _, files in committed(file_url)] == [files for _, files in committed(other)]
