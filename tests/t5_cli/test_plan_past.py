"""A planned lake, asked for its past and its plan: `lineage`, `find`, `replay`, `status` agree with an audit of all
spans.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import json_schemas
import pytest
import trio
from lakes import SLICES, commit, produce, stepfs

from stepfs.cli.target import opened_lineage
from stepfs.store.api import StoreOptions
from stepfs_producer.run.history.lineage import Shown, Wanted, shown_spans
from torture.planned.audit import PlannedLake, audit_planned, read_lake
from torture.planned.corpus import Corpus, write_corpus

STEPS = 220
SEED = 11
RECORDS = 4  # that are looked for


@dataclass(frozen=True)
class Audited:
    """A lake of six shuffled sources in four formats, and every span of it by plain means."""

    url: str
    corpus: Corpus
    directory: Path
    lake: PlannedLake


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    directory = tmp_path_factory.mktemp("audited")
    corpus = write_corpus(directory, SEED)
    url = f"file://{directory}/lake"
    done = produce("run", corpus.plan, url, "--limit-steps", STEPS, "--workers", 2)
    assert done.code == 0, done.err
    return Audited(url, corpus, directory, read_lake(url))


async def spans_of(audited: Audited, step: int, texts_below: str | None) -> Shown:
    async with opened_lineage(audited.url, StoreOptions()) as reader:
        return await shown_spans(reader, Wanted(step), texts_below, pytest.fail)


@pytest.mark.timeout(300)
def test_every_token_is_there_once_and_pairs_stand_together(audited: Audited) -> None:
    audit = audit_planned(audited.corpus, audited.lake, audited.lake)
    assert not audit.faults
    assert {piece.side for step in audited.lake.pieces for piece in step} == {0, 1, 2}
    longest = max(audited.corpus.parts, key=lambda address: len(audited.corpus.ids(address)))
    assert len(audited.corpus.ids(longest)) > 128, "a chat longer than a row"
    assert audit.skipped > 0


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_lineage_of_every_step_is_the_audits_and_its_texts_are_those_tokenised(audited: Audited) -> None:
    seen = set()
    for step, pieces in enumerate(audited.lake.pieces):
        with_text = step % 3 == 0
        shown = trio.run(spans_of, audited, step, str(audited.directory) if with_text else None)
        assert [
            (span.epoch, span.source, span.file_number, span.record, span.first, span.tokens) for span in shown.spans
        ] == [(piece.epoch, *piece.address, piece.first, len(piece.ids)) for piece in pieces]
        for span in shown.spans:
            seen.add((span.source, span.epoch))
            assert span.problem is None
            if not with_text:
                continue
            assert span.text.encode() == audited.corpus.texts[span.source, span.file_number, span.record]
    assert len(audited.lake.pieces) == STEPS
    assert len({source for source, epoch in seen if epoch}) > 1, "sources of two epochs"


@pytest.mark.timeout(300)
def test_find_and_lineage_agree(audited: Audited) -> None:
    held = defaultdict(list)
    for step, pieces in enumerate(audited.lake.pieces):
        for piece in pieces:
            held[piece.address].append((piece.epoch, step, piece.first, len(piece.ids)))
    split = [
        address
        for address, parts in held.items()
        if len({step for _, step, _, _ in parts}) > len({p[0] for p in parts})
    ]
    assert split, "documents are split between steps"
    chosen = random.Random(SEED).sample(sorted(held), RECORDS) + split[:2]
    for source, file, record in chosen:
        listed = produce("lineage", audited.url, "--step", held[source, file, record][0][1], "--json").document
        [name] = {one["file"] for one in listed["spans"] if (one["source"], one["file_number"]) == (source, file)}
        words = ["--source", source, "--file", name, "--record", record, "--plan-dir", audited.directory]
        found = produce("find", audited.url, *words, "--json").document
        json_schemas.check("produce-find", found)
        parts = [(one["epoch"], one["step"], one["first"], one["tokens"]) for one in found["found"]]
        assert sorted(parts) == sorted(held[source, file, record])
        assert {one["why"] for one in found["missing"]} <= {"not drawn yet"} | (
            {"held out, of another shard, dropped by the transform, or not fit to be decoded"}
            if source == "chats"
            else set()
        )
    said = []
    for source, file, record in sorted(bad for bad in audited.corpus.bad if bad[0] == "code")[::10]:
        words = [
            "--source", source, "--file", f"{file}.jsonl", "--record", record, "--plan-dir", audited.directory,
        ]  # fmt: skip
        ended = produce("find", audited.url, *words)
        assert (ended.code, ended.out) == (3, "")
        said.append(ended.err)
    assert any("could not be decoded (" in line for line in said), said


@pytest.mark.timeout(300)
def test_all_steps_are_made_again(audited: Audited) -> None:
    done = produce("replay", audited.url, "--steps", f"0:{STEPS}", "--plan-dir", audited.directory, "--json")
    assert done.code == 0, done.err
    json_schemas.check("produce-replay", done.document)
    assert (done.document["steps"], done.document["different"]) == (STEPS, [])


PLAN = f"""\
output: {{ext: .npy, mesh: "dp={SLICES}", sequence_length: 64}}
sources:
  code: {{format: jsonl, files: code.jsonl, on_error: {{do: skip}}}}
  prose: {{format: text, records: lines, files: prose.txt}}
mix: {{code: 25, prose: 75}}
"""


@pytest.fixture
def summary(tmp_path, file_url):
    """Of a run of 8 steps into a lake that another producer uses, too."""
    lines = [json.dumps({"text": f"code {n} " + "x" * (n % 40)}) for n in range(99)]
    for place in range(5, 99, 12):
        lines[place] = "{"
    (tmp_path / "code.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prose.txt").write_text("".join(f"prose {n} " + "y" * (n * 31 % 120) + "\n" for n in range(99)))
    (tmp_path / "plan.yaml").write_text(PLAN)
    stepfs("init", file_url, "--slices", SLICES, "--ext", ".npy")
    commit(file_url, range(3))
    plan = tmp_path / "plan.yaml"
    done = produce("run", plan, file_url, "--workers", 1, "--limit-steps", 8, "--json")
    assert done.code == 0, done.err
    return done.document


def test_what_a_run_prints_and_a_status_says_of_it_is_as_their_schemas_say(summary, file_url) -> None:
    assert summary["bad_records"], "else their fields are not compared"
    json_schemas.check("produce-run", summary)
    json_schemas.check("status-lake", stepfs("status", file_url, "--json").document)


def test_the_status_of_a_lake_agrees_with_the_run_that_filled_it(summary, file_url) -> None:
    producers = stepfs("status", file_url, "--json").document["producers"]
    plan = producers.pop("plan")["plan"]
    assert [known["plan"] for known in producers.values()] == [None] * len(producers) != []
    assert (plan["digest"], plan["step"], plan["tokens"]) == (summary["plan"], 8, summary["total"]["tokens"])
    same = ("tokens", "share", "records", "skipped", "dropped", "plain", "excluded", "epoch")
    assert plan["sources"] == {
        name: {field: source[field] for field in same} for name, source in summary["sources"].items()
    }
    assert plan["sources"]["code"]["skipped"]
    shown = [line.split() for line in stepfs("status", file_url).out.splitlines()]
    prose = plan["sources"]["prose"]
    assert ["plan", "prose", str(prose["tokens"]), f"{prose['share']:.2%}"] in [row[:4] for row in shown]
