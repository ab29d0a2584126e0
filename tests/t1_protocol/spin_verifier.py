"""A model of spin, compiled into the program that searches it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from finished import ran

MODELS = Path(__file__).parent / "model"
DEPTH_MAX = 20_000
MEMORY_MAX_MIB = 2048

Bounds = dict[str, int]


@dataclass(frozen=True)
class Search:
    """What one run of a verifier found."""

    violated: str | None  # a property, or "witness 3"
    unreached: frozenset[int]  # witnesses; one that stands in several places counts when one of them is missed


class Verifier:
    """One model, compiled in `place` unless it is there already; other bounds come with each search, run in `runs`."""

    def __init__(
        self, model: str, place: Path, defines: list[str], runs: Path | None = None, optimise: str = "-O1"
    ) -> None:
        self.source = (MODELS / f"{model}.pml").read_text()
        names = re.search(r"^mtype = \{(.*?)\}", self.source, re.MULTILINE)
        assert names is not None
        order = [name.strip() for name in names[1].split(",")]
        self.numbers = {name: len(order) - index for index, name in enumerate(order)}  # spin counts from the end
        self.program, self.runs = place / "pan", runs or place
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.program.exists():
                self._compile(MODELS / f"{model}.pml", place, defines, optimise)

    def _compile(self, model: Path, place: Path, defines: list[str], optimise: str) -> None:
        # PRINTF is for the table of decisions.
        options = ["-w", "-DPRINTF", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MAX_MIB}", "-o", "pan", "pan.c"]
        for command in ([tool("spin"), "-a", *defines, str(model)], [tool("gcc"), optimise, *options]):
            done = ran(command, cwd=place, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            assert not done.stderr, done.stderr

    @property
    def witnesses(self) -> frozenset[int]:
        return frozenset(int(number) for number in re.findall(r"\bsaw\((\d+)\)", self.source))

    def output(self, bounds: Bounds, *, timeout_s: float = 600) -> str:
        """Search all of it, or up to the first violation, and return what the verifier printed."""
        environment = {"PATH": os.environ["PATH"]} | {key: str(value) for key, value in bounds.items()}
        done = subprocess.run(
            [str(self.program), f"-m{DEPTH_MAX}", "-w22"],
            check=False,
            cwd=self.runs,  # where it leaves the trail of a violation
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return done.stdout + done.stderr

    def search(self, bounds: Bounds, *, timeout_s: float = 600, **more: int) -> Search:
        """What `output` found. An incomplete search is a failure of its own."""
        found = self.output(bounds | more, timeout_s=timeout_s)
        for trouble in ("max search depth too small", "out of memory", "Search not completed", "invalid end state ("):
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
    assert found is not None, f"{name} is missing: run scripts/setup, which installs it (Debian package {name})"
    return found
