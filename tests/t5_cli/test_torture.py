"""scripts/torture: a small run that holds, and an audit that would notice if one did not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tools

from spans_audit import Address, Piece
from stepfs_producer.plan.step import SourceState, State
from torture.audit import Audit, audit_journals
from torture.planned.audit import PlannedLake, audit_planned
from torture.planned.corpus import Corpus
from torture.processes import Actor
from torture.records import Journal, Origin, payload, recognise
from torture.run import Run
from torture.sampler import Sampler

Edit = Callable[[list[dict]], object]


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_a_small_run_holds_and_leaves_nothing(tmp_path: Path) -> None:
    options = ["--store", "file", "--kills", "5", "--seed", "1687"]  # one of each kind at least
    options += ["--producers", "2", "--readers", "2", "--every", "0.7", "--rate", "8", "--json"]
    done = tools.ran("torture", *options, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kills = found["kills"]
    assert sum(kills.values()) - kills["reader"] - kills["sampler"] >= 5
    assert set(found["sampled"]) >= {"whole", "pieces", "mapped"}
    assert kills["server"] == 0
    assert found["fenced_zombies"] == found["frozen"]["producer"]
    assert found["steps"] == found["records"] > 0
    assert not any(found[what] for what in ("lost", "duplicated", "torn", "disordered", "readers_differ", "faults"))
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    command = tools.command("torture", "--store", "file", "--producers", "1")
    with subprocess.Popen(
        [*command, "--readers", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env=tools.environment(TMPDIR=str(tmp_path)),
    ) as run:
        deadline = time.monotonic() + 60
        while not any('"sha"' in line for line in read_so_far(tmp_path)):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.terminate()
        assert "everything it started is stopped" in run.communicate(timeout=100)[1]
    assert run.returncode == 130
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def read_so_far(tmp_path: Path) -> list[str]:
    """What the reader has noted: by then all the others are at work."""
    return [line for path in tmp_path.glob("*/reader-0.journal") for line in path.read_text().splitlines()]


def audited(tmp_path: Path, edit: Edit, *, committed: int = 3) -> Audit:
    """Two producers of three records each as two readers saw them; `edit` changes what the second one saw."""
    seen = [
        {"step": step, "sha": f"{step}", "whose": [f"producer-{step % 2}", step // 2], "version": step}
        | {"epoch": 1 + step // 4, "said": f"producer-{step % 2}"}
        for step in range(6)
    ]
    run = Run(tmp_path, 0, "file:///nowhere", None)
    for name in ("producer-0", "producer-1", "reader-0", "reader-1"):
        path = tmp_path / f"{name}.journal"
        run.actors.append(Actor(name[:-2], name, [], tmp_path / "log", path))
        journal = Journal(path)
        if name.startswith("producer"):
            journal.note(committed=committed, tally={"attempts": 3, "lost": 0, "undecided": 0})
            continue
        notes = [dict(note) for note in seen]
        if name == "reader-1":
            edit(notes)
        for note in notes:
            journal.note(**note)
    return audit_journals(run, 6)


def test_the_audit_is_content_when_all_is_well(tmp_path: Path) -> None:
    audit = audited(tmp_path, lambda notes: notes.append(notes[2]))  # read again after a restart
    assert not audit.faults
    assert (audit.records, audit.readings) == (6, 13)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda notes: notes.pop(3), "did not see 1 steps"),
        (lambda notes: notes[3].update(sha="other"), "step 3 is"),
        (lambda notes: notes[3].update(whose=["producer-1", 0]), "step 3 is"),
        (lambda notes: notes[5].update(epoch=0), "fenced"),
        (lambda notes: notes[5].update(version=3), "fenced"),
        (lambda notes: notes[5].update(said="producer-0"), "holds bytes of"),
    ],
)
def test_the_audit_notices_what_a_reader_saw(tmp_path: Path, edit: Edit, said: str) -> None:
    assert any(said in fault for fault in audited(tmp_path, edit).faults)


def test_the_audit_notices_what_was_promised_and_is_not_there(tmp_path: Path) -> None:
    audit = audited(tmp_path, lambda notes: None, committed=4)
    assert audit.lost == 2
    assert any("not exactly 0 to 3" in fault for fault in audit.faults)


def test_payloads_are_recognised_only_whole() -> None:
    data = payload(7, Origin("producer-0", 12, 1))
    assert recognise(7, data) == Origin("producer-0", 12, 1)
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    assert not any(recognise(7, other) for other in (flipped, data[:-1], data + b"\0", data[1:], b""))
    assert recognise(8, data) is None


def test_reads_that_a_killed_daemon_leaves_short_are_not_torn_ones(tmp_path: Path, monkeypatch) -> None:
    """The rest of the pages may be in the page cache, and the next read of the same range says that the daemon is gone."""
    file, data = tmp_path / "file", random.Random(7).randbytes(385_129)
    file.write_bytes(data)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, random.randint(1, size), offset))
    with file.open("rb") as opened:
        assert all(Sampler._pieces(opened.fileno()) == data for _ in range(20))


@pytest.mark.nightly  # test_produce_run kills workers and commands, too; the audit's mutants run below
@pytest.mark.timeout(300)
def test_a_small_run_of_a_plan_holds_and_leaves_nothing(tmp_path: Path) -> None:
    options = ["--store", "file", "--kills", "4", "--seed", "3", "--workers", "1"]
    options += ["--every", "0.5", "--rate", "20", "--json"]
    done = tools.ran("torture", "--plan", *options, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"]["worker"] + found["kills"]["command"] == 4
    assert found["steps"] > 20
    assert found["samples"] > 400
    assert not list(tmp_path.iterdir())


ADDRESSES: list[Address] = [("code", 0, offset) for offset in (0, 10, 20)]
PAIR: Address = ("pairs", 0, 0)
SIDES = [[*b"is it? yes", 256], [*b"is it? no", 256]]
TEXTS = {address: b"text %d" % index for index, address in enumerate(ADDRESSES)}
CORPUS = Corpus(Path(), {**TEXTS, PAIR: b"{}"}, {("code", 0, 30)}, {PAIR: SIDES})


def lake() -> PlannedLake:
    """One epoch of three records and a bad one, and of a pair, in two steps; the second record is cut between them."""
    ids = [CORPUS.ids(address) for address in ADDRESSES]
    pieces = [
        [Piece(0, ADDRESSES[0], 0, ids[0]), Piece(0, ADDRESSES[1], 0, ids[1][:3])],
        [Piece(0, ADDRESSES[1], 3, ids[1][3:]), Piece(0, ADDRESSES[2], 0, ids[2])],
    ]
    pieces[1] += [Piece(0, PAIR, at, SIDES[side], 1, side + 1) for side, at in enumerate((0, len(SIDES[0])))]
    sources = {
        "code": SourceState("i", "l", epoch=1, records=4, skipped=1, tokens=sum(map(len, ids))),
        "pairs": SourceState("i", "l", epoch=1, records=1, tokens=sum(map(len, SIDES))),
    }
    return PlannedLake([("a",), ("b",)], pieces, {2: State("plan", 2, sources)})


def cut(pieces: list[Piece]) -> None:
    """The chosen document into two."""
    whole = pieces[2]
    pieces[2:3] = [replace(whole, ids=whole.ids[:3]), replace(whole, first=3, ids=whole.ids[3:])]


def faults(tormented: PlannedLake) -> str:
    return "\n".join(audit_planned(CORPUS, tormented, lake()).faults)


def test_the_audit_of_a_plan_is_content_when_all_is_well() -> None:
    assert not faults(lake())


def test_the_audit_notices_other_bytes_and_lost_steps() -> None:
    wrong = lake()
    wrong.digests[1] = ("c",)
    assert "step 1 has other bytes" in faults(wrong)
    wrong.digests.pop()
    assert "1 steps, 2 in the undisturbed lake" in faults(wrong)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda pieces: pieces[1].pop(1), "records are lost"),
        (lambda pieces: pieces[1].pop(0), "is not whole"),
        (lambda pieces: pieces[1].pop(), "is not whole"),
        (lambda pieces: pieces[1].append(replace(pieces[1].pop(), micro=0)), "do not stand one behind the other"),
        (lambda pieces: pieces[1].insert(2, pieces[1].pop()), "do not stand one behind the other"),
        (lambda pieces: cut(pieces[1]), "cut at [3]"),
        (lambda pieces: pieces[1].append(pieces[0][0]), "twice"),
        (lambda pieces: pieces[0].append(replace(pieces[0][0], address=("code", 0, 30))), "a bad one"),
        (lambda pieces: pieces[0].append(replace(pieces[0].pop(0), ids=[7] * 7)), "other tokens"),
    ],
    ids=["lost", "torn", "half a pair", "parted", "rejected first", "cut", "twice", "bad", "other"],
)
def test_the_audit_notices_what_happened_to_a_record(edit, said: str) -> None:
    wrong = lake()
    edit(wrong.pieces)
    assert said in faults(wrong)


def test_the_audit_notices_a_position_that_says_something_else() -> None:
    wrong = lake()
    sources = wrong.positions[2].sources
    code = replace(sources["code"], tokens=sources["code"].tokens - 1)
    wrong.positions[2] = State("plan", 2, {**sources, "code": code})
    assert "position behind step 2" in faults(wrong)
