"""The protocol as a model, searched exhaustively by spin: every interleaving of requests within small bounds.

The simulator samples long runs of the code; the model sees all short runs of what the code does between store and
store. `model/log.pml` has commit, fence and floor, `model/control.pml` has groups, reclaim and repair. A model that
proves too much is the danger here: so each witness in it must be reached, each mutant must break the property that it is
for, and what `control.pml` decides is what `decide` decides (decision_table.py).

To see a refutation step by step: `spin -a log.pml; gcc -DSAFETY -o pan pan.c; MUTANT=6 PROCESSES=3 ./pan; MUTANT=6
PROCESSES=3 ./pan -r`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from decision_table import Table, decided, read_table
from spin_verifier import MODELS, Bounds, Verifier

from stepfs.lake import decisions

KILLED: Bounds = {"PROCESSES": 0b0101, "RESTARTS": 1}  # two producers; each may be killed anywhere, and restarts
ZOMBIE: Bounds = {"PROCESSES": 0b0011, "APPENDS": 2}  # one producer; its first incarnation lives on beside the second
TWICE: Bounds = {"PROCESSES": 0b0011, "APPENDS": 3, "ROUNDS": 2, "FAULTS": 0}  # the same; the floor rises twice
ALONE: Bounds = {"PROCESSES": 0b00101, "OPERATIONS_OF_0": 2, "ROUNDS": 2}  # a writer calls twice, one reclaimer
SAME_GROUP: Bounds = {"PROCESSES": 0b00111, "FAULTS": 0}  # two writers
TWO_GROUPS: Bounds = {"PROCESSES": 0b00111, "FAULTS": 0, "HOME_OF_1": 1}
REPAIRED: Bounds = {"PROCESSES": 0b10101, "OPERATIONS_OF_0": 2, "CALLS": 0b10001010}  # add, hook, retire
TWO_RECLAIMERS: Bounds = {"PROCESSES": 0b11101}
TABLE: Bounds = {"PROCESSES": 0b100000}

BASE = {"log": [KILLED, ZOMBIE, TWICE], "control": [ALONE, SAME_GROUP, TWO_GROUPS, REPAIRED, TWO_RECLAIMERS]}

MUTANTS = [
    ("log", 1, ZOMBIE, "fencing"),  # rebase looks at no incarnation
    ("log", 2, KILLED, "exactly_once"),  # a 412 is believed without reading, and no guard by seq
    ("log", 3, KILLED, "exactly_once"),  # the unresolved create is forgotten, and no guard by seq
    ("log", 4, ZOMBIE, "durable"),  # what was appended while a create was unresolved is dropped with it
    ("log", 5, KILLED, "readers_agree"),  # a cold open does not count what it listed as unconfirmed
    ("log", 6, ZOMBIE, "durable"),  # the floor is not read after the create
    ("log", 7, ZOMBIE, "spurious_corrupt"),  # slots are deleted before the floor is raised
    ("log", 8, ZOMBIE, "spurious_corrupt"),  # no snapshot at the new floor
    ("control", 1, ALONE, "promised_gone"),  # a request does not look at the first live step
    ("control", 2, ALONE, "needed_deleted"),  # an advance takes whatever slot is free
    ("control", 3, ALONE, "promise_undone"),  # a new life believes what is on record, without taking a slot
    # So does a call after one that had no answer.
    ("control", 4, ALONE | {"CALLS": 0b10101000, "OPERATIONS_OF_0": 3}, "promise_undone"),
    ("control", 5, ALONE, "needed_deleted"),  # steps are deleted before the advance is on record
    ("control", 6, ALONE, "grace_broken"),  # an advance is decided again on a record that was not looked at
    ("control", 7, ALONE, "grace_broken"),  # the minima of the need are forgotten
    ("control", 8, ALONE, "grace_broken"),  # a minimum ends with the record before the one that ended it
    ("control", 9, REPAIRED, "promised_gone"),  # a repair believes the first live step of the record before
    ("control", 10, REPAIRED, "promise_undone"),  # a repair goes on after a record that it was not decided on
    ("control", 11, REPAIRED, "needed_deleted"),  # a reclaim is running during a repair
]

LARGER = [
    ("log", [], KILLED | {"APPENDS": 2}),
    ("log", ["-DSLOTS=3"], {"PROCESSES": 0b0111}),
    ("log", ["-DSLOTS=3", "-DSTARTED=0"], {"PROCESSES": 0b0011, "FAULTS": 2}),
    ("control", [], ALONE | {"OPERATIONS_OF_0": 3}),
    ("control", [], SAME_GROUP | {"FAULTS": 1}),
    ("control", [], SAME_GROUP | {"OPERATIONS_OF_0": 2}),
    ("control", [], TWO_GROUPS | {"FAULTS": 1}),
    ("control", [], SAME_GROUP | {"PROCESSES": 0b10111}),
    ("control", ["-DSLOTS=6"], REPAIRED | {"FAULTS": 2, "ROUNDS": 2}),
]


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Verifier]:
    """Compiled once for all processes that run these tests beside each other."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    @functools.cache
    def verifier(model: str) -> Verifier:
        place = shared / f"verifier-of-{model}"
        place.mkdir(exist_ok=True)
        return Verifier(model, place, [], runs=tmp_path_factory.mktemp(model))

    return verifier


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Table]:
    """Every transition of the model, as decision_table.py writes them; compiled in a tenth of the time."""
    verifier = Verifier("control", tmp_path_factory.mktemp("table"), [], optimise="-O0")
    names = re.search(r"^mtype:request = \{(.*?)\}", verifier.source, re.MULTILINE)
    assert names is not None
    by_number = [name.strip() for name in reversed(names[1].split(","))]
    return functools.cache(lambda **more: read_table(verifier.output(TABLE | more), by_number))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", BASE)
def test_every_interleaving_holds_and_every_witness_is_reached(model, verifiers):
    verifier = verifiers(model)
    missing = verifier.witnesses
    for bounds in BASE[model]:
        found = verifier.search(bounds)
        assert found.violated is None
        missing &= found.unreached
    never = {
        number
        for number in missing
        if all(verifier.search(bounds, WITNESS=number).violated is None for bounds in BASE[model])
    }
    assert not never, f"witnesses of {model}.pml that no run reaches: {sorted(never)}"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "mutant", "bounds", "broken"), MUTANTS)
def test_each_mutant_breaks_its_property(model, mutant, bounds: Bounds, broken, verifiers):
    verifier = verifiers(model)
    found = verifier.search(bounds, MUTANT=mutant, PROPERTY=verifier.numbers[broken])
    assert found.violated == broken


def test_no_mutant_in_the_models_is_left_out() -> None:
    for model in BASE:
        source = (MODELS / f"{model}.pml").read_text()
        present = {int(number) for number in re.findall(r"\bmutant [=!]= (\d+)", source)}
        assert present == {mutant for name, mutant, _, _ in MUTANTS if name == model}


def test_the_model_decides_what_the_code_decides(rows: Callable[..., Table]) -> None:
    model = rows()
    assert len(model) == 17340
    assert {row: (model[row], told) for row, told in decided(model).items() if told != model[row]} == {}


@pytest.mark.parametrize("mutant", [1, 7, 8])
def test_a_change_of_the_models_decisions_is_seen(mutant: int, rows: Callable[..., Table]) -> None:
    assert differ(rows(MUTANT=mutant))


def differ(model: Table) -> bool:
    return any(decided([row])[row] != told for row, told in model.items())


@pytest.mark.parametrize(
    ("room", "name", "otherwise"), [
        (decisions, "set_order", lambda order, _: order), (decisions, "_check", lambda *_: None),
        (decisions.Add, "fences", False), (decisions.Register, "fences", False),
    ],
)  # fmt: skip
def test_a_change_of_the_codes_decisions_is_seen(room, name, otherwise, rows, monkeypatch):
    model = rows()
    monkeypatch.setattr(room, name, otherwise)
    assert differ(model)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "defines", "bounds"), LARGER)
def test_larger_bounds(model: str, defines: list[str], bounds: Bounds, tmp_path: Path) -> None:
    assert Verifier(model, tmp_path, defines).search(bounds, timeout_s=3600).violated is None
