"""Put one small mistake after the other into a copy of the tree, and run the tests that come past it.

A run of all tests under coverage says which ones come past which line. A mutant gets those, the cheapest of each file
first, for `--budget` seconds of them: one of them fails, or the mutant is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from mutation.changes import Mutant, mutants_of

ROOT: Final = Path(__file__).resolve().parents[3]
LAYERS: Final = ("tests/t0_pure", "tests/t1_protocol", "tests/t2_stores", "tests/t3_unmounted")
ROOMS: Final = (
    "fs/stepfs/lake",
    "fs/stepfs/data",
    *(f"producer/stepfs_producer/{room}" for room in ("plan", "commit", "sources")),
)
COPIED: Final = ("fs", "producer", "tests", "scripts", "pyproject.toml", "README.md", "CHANGELOG.md", ".github")
STARTING_S: Final = 60  # of pytest, before its first test
CAUGHT: Final = {"caught", "hung"}


@dataclass(frozen=True)
class Map:
    """Which tests come past each line, and how long each takes."""

    tests: Mapping[str, Mapping[int, list[str]]]  # by file, by line
    seconds: Mapping[str, float]

    def past(self, mutant: Mutant, budget_s: float) -> list[str]:
        """Tests, the cheapest of each file in turns; those of the whole file for a line that only an import runs."""
        lines = self.tests.get(mutant.path, {})
        tests = lines.get(mutant.line) or sorted({test for each in lines.values() for test in each})
        by_file: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            by_file[test.partition("::")[0]].append(test)
        chosen: list[str] = []
        left = budget_s
        for turn in itertools.zip_longest(*by_file.values()):
            for test in filter(None, turn):
                left -= self.seconds.get(test, 0.0)
                if chosen and left < 0:
                    return chosen
                chosen.append(test)
        return chosen


@dataclass(frozen=True)
class Verdict:
    """What the tests made of a mutant."""

    mutant: Mutant
    outcome: str  # caught | hung | missed | "no test"
    by: list[str] = field(default_factory=list)  # the test files that noticed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="mutation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="default: 300")
    parser.add_argument("--room", action="append", metavar="DIR", help="only below it; may be repeated")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds of tests a mutant; default 60")
    parser.add_argument(
        "--alone", action="store_true", help="run all tests of a mutant, and say what each file alone catches"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="an earlier mutants.json: exit 1 where it caught more"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".mutation", help="default: .mutation/; keeps the map of tests"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = draw(options.room or ROOMS, options.count)
    with tempfile.TemporaryDirectory(prefix="stepfs-mutation-") as directory:
        trees = [copy_tree(Path(directory) / f"tree-{number}") for number in range(options.jobs)]
        known = load_map(options.out.resolve(), trees)
        verdicts = list(judge(drawn, known, trees, options))
    tell(verdicts)
    (options.out / "mutants.json").write_text(
        json.dumps([{**asdict(each), "name": each.mutant.name} for each in verdicts])
    )
    if options.against is not None:
        sys.exit(compare(verdicts, json.loads(options.against.read_text())))


def draw(rooms: Iterable[str], count: int) -> list[Mutant]:
    files = sorted({path for room in rooms for path in (ROOT / room).rglob("*.py")})
    if not files:
        sys.exit(f"mutation: no Python files below {', '.join(rooms)}")
    found = [each for path in files for each in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())]
    print(f"{min(count, len(found))} of {len(found)} mutants in {len(files)} files")
    return sorted(found, key=lambda mutant: mutant.rank)[:count]


def load_map(out: Path, trees: list[Path]) -> Map:
    """Made in a copy, so that what fails there for another reason is known; anew where a file is newer."""
    data, costs, failed = out / "coverage", out / "costs.tsv", out / "failed.json"
    newest = max(path.stat().st_mtime for top in ("fs", "producer", "tests") for path in (ROOT / top).rglob("*.py"))
    if not data.exists() or data.stat().st_mtime < newest:
        print("mapping: which tests come past which line (seven minutes on two cores)", flush=True)
        subprocess.run([*python(), *PYTEST, "-n", str(len(trees)), "--cov=stepfs", "--cov=stepfs_producer",
                        "--cov-context=test", "--cov-report=", f"--costs={costs}", *LAYERS], cwd=trees[0], check=False,
                       env=environment(trees[0], COVERAGE_FILE=str(data)))  # fmt: skip
        if not data.exists():
            sys.exit("mutation: no coverage was recorded; scripts/setup --nightly brings what records it")
        found = trees[0] / ".pytest_cache/v/cache/lastfailed"
        failed.write_text(found.read_text() if found.exists() else "{}")
    from coverage import CoverageData  # noqa: PLC0415 (nightly tests alone need it)

    recorded, passed_by = CoverageData(basename=str(data)), set(json.loads(failed.read_text()))
    recorded.read()
    tests: dict[str, dict[int, list[str]]] = {}
    for name in recorded.measured_files():
        lines = recorded.contexts_by_lineno(name).items()
        tests[re.sub(r"^.*/(?=(fs|producer)/stepfs)", "", name)] = {
            line: sorted({test_of(context) for context in contexts if context} - passed_by) for line, contexts in lines
        }
    rows = [line.split("\t") for line in costs.read_text().splitlines()[1:]]
    print(f"{len(rows)} tests; {len(passed_by)} fail in a copy, and judge nothing")
    return Map(tests, {test: float(seconds) for _, seconds, test in rows})


def test_of(context: str) -> str:
    """Of pytest-cov's `test|phase`; the parameters of a test may have the same sign."""
    return context.rpartition("|")[0]


PYTEST: Final = ("-m", "pytest", "-p", "layers", "-q", "-W", "ignore::pytest.PytestCollectionWarning")


def python() -> list[str]:
    return [str(ROOT / ".venv/bin/python")]


def environment(tree: Path, **others: str) -> dict[str, str]:
    paths = [tree / "tests", tree / "scripts/lib", tree / "fs", tree / "producer"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1", **others}


def judge(drawn: list[Mutant], known: Map, trees: list[Path], options: argparse.Namespace) -> Iterator[Verdict]:
    began_s = time.monotonic()
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Verdict:
        tree = free.get()
        try:
            return try_out(mutant, known.past(mutant, options.budget), tree, all_of_them=options.alone)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for number, verdict in enumerate(pool.map(one, drawn), 1):
            mutant = verdict.mutant
            if verdict.outcome not in CAUGHT:
                print(f"{verdict.outcome}: {mutant.path}:{mutant.line} {mutant.was}\n    {mutant.what}", flush=True)
            if not number % 20:
                print(f"{number} of {len(drawn)}, {time.monotonic() - began_s:.0f} s", flush=True)
            yield verdict


def copy_tree(tree: Path) -> Path:
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def run(tests: list[str], tree: Path, *, all_of_them: bool) -> subprocess.CompletedProcess[str]:
    chosen = tree / "chosen"
    chosen.write_text("\n".join(tests))
    command = [*python(), *PYTEST, "-n", "0", "-p", "no:cacheprovider", "--timeout", "30", "--tb=no", "-rfE",
               f"--basetemp={tree / 'tmp'}", *([] if all_of_them else ["-x"]), f"@{chosen}"]  # fmt: skip
    return subprocess.run(
        command, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=300, check=False
    )


def unknown_of(said: str, tree: Path) -> set[str]:
    """Tests, without their parameters, as pytest names what it does not find."""
    return {line.removeprefix(f"ERROR: not found: {tree}/") for line in said.splitlines() if "ERROR: not found" in line}


def try_out(mutant: Mutant, tests: list[str], tree: Path, *, all_of_them: bool) -> Verdict:
    if not tests:
        return Verdict(mutant, "no test")
    path = tree / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.applied(source))
    try:
        done = run(tests, tree, all_of_them=all_of_them)
        if unknown := unknown_of(done.stderr, tree):  # the mutant is in what tests are made of: others judge it
            tests = [test for test in tests if test.partition("[")[0] not in unknown]
            if not tests:  # pytest would run all there are
                return Verdict(mutant, "no test")
            done = run(tests, tree, all_of_them=all_of_them)
    except subprocess.TimeoutExpired:
        return Verdict(mutant, "hung")
    finally:
        path.write_bytes(source)
    failed = [
        line.split()[1].partition("::")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return Verdict(mutant, "missed" if done.returncode == 0 else "caught", sorted(set(failed)))


def tell(verdicts: list[Verdict]) -> None:
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in verdicts:
        rooms["/".join(each.mutant.path.split("/")[1:3])][each.outcome] += 1
    print(f"\n{'room':<28}{'mutants':>8}{'caught':>8}{'missed':>8}{'no test':>8}")
    for room, counts in sorted(rooms.items()):
        caught = sum(counts[name] for name in CAUGHT)
        print(f"{room:<28}{counts.total():>8}{caught:>8}{counts['missed']:>8}{counts['no test']:>8}")
    caught = sum(each.outcome in CAUGHT for each in verdicts)
    print(f"caught: {caught} of {len(verdicts)}, {caught / max(1, len(verdicts)):.0%}")
    alone = Counter(each.by[0] for each in verdicts if len(each.by) == 1)
    for name, count in alone.most_common():
        print(f"{count:>5} caught by {name} first or alone")


def compare(verdicts: list[Verdict], before: list[dict[str, object]]) -> int:
    """How many were caught before and are missed now, each printed; 0 or 1 as an exit code."""
    caught = {each["name"] for each in before if each["outcome"] in CAUGHT}
    lost = [each.mutant for each in verdicts if each.outcome not in CAUGHT and each.mutant.name in caught]
    for mutant in lost:
        print(f"caught before, and not now: {mutant.path}:{mutant.line} {mutant.what}")
    return int(bool(lost))


if __name__ == "__main__":
    main()
