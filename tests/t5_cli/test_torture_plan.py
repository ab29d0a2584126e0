"""scripts/torture --plan: a small run that holds, and an audit that would notice if one did not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tools

from stepfs_producer.plan.step import SourceState, State
from torture.planned.audit import Piece, PlannedLake, audit_planned
from torture.planned.corpus import Address, Corpus


@pytest.mark.slow  # test_produce_run kills workers and commands, too; the audit's mutants run below
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
CORPUS = Corpus(Path(), {address: b"text %d" % index for index, address in enumerate(ADDRESSES)}, {("code", 0, 30)})


def lake() -> PlannedLake:
    """One epoch of three records and a bad one, in two steps; the second record is cut between them."""
    ids = [CORPUS.ids(address) for address in ADDRESSES]
    pieces = [
        [Piece(0, ADDRESSES[0], 0, ids[0]), Piece(0, ADDRESSES[1], 0, ids[1][:3])],
        [Piece(0, ADDRESSES[1], 3, ids[1][3:]), Piece(0, ADDRESSES[2], 0, ids[2])],
    ]
    source = SourceState("i", "l", epoch=1, records=4, skipped=1, tokens=sum(map(len, ids)))
    return PlannedLake([("a",), ("b",)], pieces, {2: State("plan", 2, {"code": source})})


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
        (lambda pieces: pieces[1].pop(), "records are lost"),
        (lambda pieces: pieces[1].pop(0), "is not whole"),
        (lambda pieces: pieces[1].append(pieces[0][0]), "twice"),
        (lambda pieces: pieces[0].append(replace(pieces[0][0], address=("code", 0, 30))), "a bad one"),
        (lambda pieces: pieces[0].append(replace(pieces[0].pop(0), ids=[7] * 7)), "other tokens"),
    ],
    ids=["lost", "torn", "twice", "bad", "other"],
)
def test_the_audit_notices_what_happened_to_a_record(edit, said: str) -> None:
    wrong = lake()
    edit(wrong.pieces)
    assert said in faults(wrong)


def test_the_audit_notices_a_position_that_says_something_else() -> None:
    wrong = lake()
    source = wrong.positions[2].sources["code"]
    wrong.positions[2] = State("plan", 2, {"code": replace(source, tokens=source.tokens - 1)})
    assert "position behind step 2" in faults(wrong)
