"""The protocol as a model, searched exhaustively by spin: every interleaving of requests within small bounds.

The simulator samples long runs of the code; the model sees all short runs of what the code does between store and
store. `model/log.pml` has commit, fence and floor, `model/groups.pml` has groups and reclaim. A model that proves too
much is the danger here: so each witness in it must be reached, and each mutant must break the property that it is for.

To see a refutation step by step: `spin -a log.pml; gcc -DSAFETY -o pan pan.c; MUTANT=6 PROCESSES=3 ./pan; MUTANT=6
PROCESSES=3 ./pan -r`.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

MODELS = Path(__file__).parent / "model"
DEPTH_MAX = 20_000
MEMORY_MAX_MIB = 2048

Bounds = dict[str, int]

KILLED: Bounds = {
    "PROCESSES": 0b0101,
    "RESTARTS": 1,
}  # two producers; each may be killed anywhere, and restarts
ZOMBIE: Bounds = {
    "PROCESSES": 0b0011,
    "APPENDS": 2,
}  # one producer; its first incarnation lives on beside the second
TWICE: Bounds = {
    "PROCESSES": 0b0011,
    "APPENDS": 3,
    "ROUNDS": 2,
    "FAULTS": 0,
}  # the same; the floor rises twice
ALONE: Bounds = {
    "PROCESSES": 0b0101,
    "OPERATIONS_OF_0": 2,
}  # one writer of a group calls twice, one reclaimer
SAME_GROUP: Bounds = {"PROCESSES": 0b0111, "HOME_OF_1": 0, "FAULTS": 0, "CALLS": 0b0010}  # two writers add
TWO_GROUPS: Bounds = {"PROCESSES": 0b0111, "HOME_OF_1": 1, "FAULTS": 0, "CALLS": 0b0101}  # register and hook

BASE = {"log": [KILLED, ZOMBIE, TWICE], "groups": [ALONE, SAME_GROUP, TWO_GROUPS]}

MUTANTS = [
    ("log", 1, ZOMBIE, "fencing"),  # rebase looks at no incarnation
    ("log", 2, KILLED, "exactly_once"),  # a 412 is believed without reading, and no guard by seq
    ("log", 3, KILLED, "exactly_once"),  # the unresolved create is forgotten, and no guard by seq
    ("log", 4, ZOMBIE, "durable"),  # what was appended while a create was unresolved is dropped with it
    ("log", 5, KILLED, "readers_agree"),  # a cold open does not count what it listed as unconfirmed
    ("log", 6, ZOMBIE, "durable"),  # the floor is not read after the create
    ("log", 7, ZOMBIE, "spurious_corrupt"),  # slots are deleted before the floor is raised
    ("log", 8, ZOMBIE, "spurious_corrupt"),  # no snapshot at the new floor
    ("groups", 1, ALONE, "needed_deleted"),  # the groups are not listed again after closing
    ("groups", 2, ALONE, "needed_deleted"),  # a group does not read the floor after its record
    ("groups", 3, ALONE, "needed_deleted"),  # the floor record is not directly after the closing one
    ("groups", 4, SAME_GROUP | {"OPERATIONS_OF_1": 2}, "needed_deleted"),  # the slot need not be the greatest
    ("groups", 5, ALONE, "needed_deleted"),  # an announcement is not taken back
    ("groups", 6, ALONE, "promised_gone"),  # register believes the record that it finds
    ("groups", 7, ALONE, "spurious_corrupt"),  # the newest record is trimmed as well
    ("groups", 8, ALONE, "needed_deleted"),  # no closing record
    ("groups", 9, ALONE, "promised_gone"),  # an announcement is taken back after it was followed
    (
        "groups",
        10,
        ALONE,
        "needed_deleted",
    ),  # what is on record already is not written, so a late request undoes it
    ("groups", 11, SAME_GROUP | {"OPERATIONS_OF_0": 2}, "needed_deleted"),  # what a GET shows is believed
]
_LONG = {("groups", 4), ("groups", 11)}  # searches of up to half a minute

LARGER = [
    ("log", [], KILLED | {"APPENDS": 2, "ROUNDS": 2}),
    ("log", ["-DSLOTS=3"], {"PROCESSES": 0b0111}),
    ("log", ["-DSLOTS=3", "-DSTARTED=0"], {"PROCESSES": 0b0011, "FAULTS": 2}),
    ("groups", [], ALONE | {"ROUNDS": 2, "FAULTS": 2}),
    ("groups", [], {"PROCESSES": 0b0111, "HOME_OF_1": 0, "FAULTS": 0}),
    ("groups", [], SAME_GROUP | {"OPERATIONS_OF_0": 2}),
    ("groups", [], {"PROCESSES": 0b0111, "HOME_OF_1": 1, "FAULTS": 1}),
    ("groups", [], {"PROCESSES": 0b1101}),
]


@dataclass(frozen=True)
class Search:
    """What one run of a verifier found."""

    violated: str | None  # a property, or "witness 3"
    unreached: frozenset[
        int
    ]  # witnesses; one that stands in several places counts when one of them is missed


class Verifier:
    """One model, compiled in `place` unless it is there already; other bounds come with each search, run in `runs`."""

    def __init__(self, model: str, place: Path, defines: list[str], runs: Path | None = None) -> None:
        self.source = (MODELS / f"{model}.pml").read_text()
        names = re.search(r"^mtype = \{(.*?)\}", self.source, re.MULTILINE)
        assert names is not None
        order = [name.strip() for name in names[1].split(",")]
        self.numbers = {
            name: len(order) - index for index, name in enumerate(order)
        }  # spin counts from the end
        self.program, self.runs = place / "pan", runs or place
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.program.exists():
                self._compile(MODELS / f"{model}.pml", place, defines)

    def _compile(self, model: Path, place: Path, defines: list[str]) -> None:
        for command in (
            [tool("spin"), "-a", *defines, str(model)],
            [
                tool("gcc"),
                "-O1",
                "-w",
                "-DSAFETY",
                "-DCOLLAPSE",
                f"-DMEMLIM={MEMORY_MAX_MIB}",
                "-o",
                "pan",
                "pan.c",
            ],
        ):
            done = subprocess.run(
                command, check=False, cwd=place, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert not done.stderr, done.stderr

    @property
    def witnesses(self) -> frozenset[int]:
        return frozenset(int(number) for number in re.findall(r"\bsaw\((\d+)\)", self.source))

    def search(self, bounds: Bounds, *, timeout_s: float = 600, **more: int) -> Search:
        """Search all of it, or up to the first violation. An incomplete search is a failure of its own."""
        environment = {"PATH": os.environ["PATH"]} | {
            key: str(value) for key, value in {**bounds, **more}.items()
        }
        command = [str(self.program), f"-m{DEPTH_MAX}", "-w22"]
        done = subprocess.run(
            command,
            check=False,
            cwd=self.runs,  # where it leaves the trail of a violation
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        found = done.stdout + done.stderr
        for trouble in (
            "max search depth too small",
            "out of memory",
            "Search not completed",
            "invalid end state (",
        ):
            if trouble == "Search not completed" and "assertion violated" in found:
                continue
            assert trouble not in found, found
        unreached = frozenset(int(number) for number in re.findall(r'"assert\(\(witness!=(\d+)\)\)"', found))
        violation = re.search(r"assertion violated (.*) \(at depth", found)
        if violation is None:
            assert re.search(r"errors: 0$", found, re.MULTILINE), found
            return Search(None, unreached)
        if witness := re.fullmatch(r"\(witness!=(\d+)\)", violation[1]):
            return Search(f"witness {witness[1]}", unreached)
        number = re.search(r"violated==(\w+)\)+$", violation[1])
        assert number is not None, found
        by_number = {str(value): name for name, value in self.numbers.items()}
        return Search(by_number.get(number[1], number[1]), unreached)


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, (
        f"{name} is missing: run scripts/setup, which installs it (Debian package {name})"
    )
    return found


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", BASE)
def test_every_interleaving_holds_and_every_witness_is_reached(
    model: str, verifiers: Callable[[str], Verifier]
) -> None:
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "mutant", "bounds", "broken"),
    [pytest.param(*one, marks=pytest.mark.slow) if one[:2] in _LONG else one for one in MUTANTS],
)
def test_each_mutant_breaks_its_property(
    model: str, mutant: int, bounds: Bounds, broken: str, verifiers: Callable[[str], Verifier]
) -> None:
    verifier = verifiers(model)
    found = verifier.search(bounds, MUTANT=mutant, PROPERTY=verifier.numbers[broken])
    assert found.violated == broken


def test_no_mutant_in_the_models_is_left_out() -> None:
    for model in BASE:
        source = (MODELS / f"{model}.pml").read_text()
        present = {int(number) for number in re.findall(r"\bmutant [=!]= (\d+)", source)}
        assert present == {mutant for name, mutant, _, _ in MUTANTS if name == model}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "defines", "bounds"), LARGER)
def test_larger_bounds(model: str, defines: list[str], bounds: Bounds, tmp_path: Path) -> None:
    assert Verifier(model, tmp_path, defines).search(bounds, timeout_s=3600).violated is None
