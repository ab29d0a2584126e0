"""The house as its pages describe it: rooms, their sizes, the paths that pages name, and import contracts that fail
when they are breached.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sysconfig
import tomllib
from pathlib import Path

import pytest
from finished import ran

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "fs/ARCHITECTURE.md").read_text()
PACKAGES = [ROOT / "fs/stepfs", ROOT / "producer/stepfs_producer"]
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
FOLDERS = sorted({path.parent for path in SOURCES})
LINES_MAX = 800

HOMES = (PACKAGES[0], PACKAGES[1].parent)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_in_one_line_what_lives_there(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert re.search(r"[.:;]", said.partition("\n")[0]), "no sentence"


def test_a_file_is_read_in_one_sitting() -> None:
    assert not {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > LINES_MAX
    }


def _late_names(path: Path) -> list[str]:
    """Names of a module that stand behind a class or function though their values need none of the file."""
    late, needed = [], set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            needed.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and needed:
            used = {each.id for each in ast.walk(node.value or node.target) if isinstance(each, ast.Name)}
            targets = {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            if used & needed:
                needed |= targets
            else:
                late += sorted(targets)
    return late


def test_constants_stand_at_the_top_of_their_file() -> None:
    late = {str(path.relative_to(ROOT)): names for path in SOURCES if (names := _late_names(path))}
    assert not late


def test_the_page_names_every_room_of_the_reading_side() -> None:
    rooms = {f"`{folder.relative_to(PACKAGES[0])}/`" for folder in FOLDERS if PACKAGES[0] in folder.parents}
    assert not {room for room in rooms if room not in PAGE}


def test_the_files_that_the_page_names_exist() -> None:
    named = {name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not name.startswith("tests/")}
    assert not {name for name in named if not any((home / name).exists() for home in HOMES)}


PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("fs/*.md"), *ROOT.glob("producer/*.md"), *ROOT.glob("scripts/*")]
    if path.is_file() and path.name != "CHANGELOG.md"  # which tells of the past
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_path_below_tests_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"\btests/[\w./]*\w", page.read_text()))
    kept = {name for name in named if "__pycache__" not in name}  # a cache is there or not by luck
    assert not {name for name in kept if not (ROOT / name).exists()}


# Contract → the breaches planted against it: modules, and what each imports, if anything.
BREACHES = {
    "reading never imports writing": [("stepfs.view.reads", "stepfs_producer")],
    "rooms of stepfs, highest first": [
        ("stepfs.format.upwards", "stepfs.mount.daemon.session"),
        ("stepfs.unnamed", ""),
        ("stepfs.reader.mounts", "stepfs.mount.options"),
        ("stepfs.mount.fuse.reads", "stepfs.reader"),
    ],
    "rooms of stepfs._internal, highest first": [
        ("stepfs._internal.entropy_of", ""),
        ("stepfs._internal.clock", "stepfs._internal.scrape"),
    ],
    "rooms of stepfs.lake, highest first": [
        ("stepfs.lake.log.upwards", "stepfs.lake.reclaim"),
        ("stepfs.lake.unnamed", ""),
    ],
    "rooms of stepfs.mount, highest first": [
        ("stepfs.mount.host.upwards", "stepfs.mount.fuse"),
        ("stepfs.mount.unnamed", ""),
    ],
    "rooms of stepfs.reader, highest first": [("stepfs.reader.unnamed", "")],
    "rooms of stepfs.data, highest first": [("stepfs.data.fetch", "stepfs.data.slices"), ("stepfs.data.unnamed", "")],
    "rooms of stepfs_producer, highest first": [
        ("stepfs_producer.sources.upwards", "stepfs_producer.commit.rebase"),
        ("stepfs_producer.unnamed", ""),
    ],
    "rooms of stepfs_producer.commit, highest first": [("stepfs_producer.commit.unnamed", "")],
    "writing knows nothing of mounts": [("stepfs_producer.cli.mounts", "stepfs.mount")],
    "no library stands on a command": [
        ("stepfs_producer.run.prints", "stepfs.cli.failure"),
        ("stepfs_producer.plan.opens", "stepfs.cli"),
    ],
    "preparing data knows nothing of committing": [
        (f"stepfs_producer.{room}.commits", "stepfs_producer.commit.loop")
        for room in ("payloads", "plan", "sources", "transforms")
    ],
    "committing knows nothing of what it commits": [("stepfs_producer.packs", "stepfs_producer.plan")],
    "the planner is pure": [
        ("stepfs_producer.plan.waits", "trio"),
        ("stepfs_producer.plan.reads", "os"),
        ("stepfs_producer.plan.looks", "stepfs.format.keys"),
    ],
    "each optional library has one home": [
        (f"stepfs_producer.cli.borrows_{library}", library)
        for library in ("PIL", "matplotlib", "pyarrow", "ray", "trio_parallel", "yaml", "zstandard")
    ],
    "the kernel is known to stepfs.mount alone": [("stepfs.data.kernel", "pyfuse3"), ("stepfs.cli.kernel", "pyfuse3")],
    "S3 is known to stepfs.store.s3 alone": [
        ("stepfs.store.buckets", "boto3"),
        ("stepfs_producer.buckets", "botocore.config"),
    ],
    "obstore is known to stepfs.store.cloud alone": [("stepfs.store.s3.clouds", "obstore")],
    "terminals are the command lines' business": [
        ("stepfs.doctor.prints", "rich.table"),
        ("stepfs_producer.sources.asks", "typer"),
    ],
    "torch stays out of the core": [("stepfs.checkpoints.tensors", "torch")],
}


def report_of(module: str, imported: str) -> str:
    """How lint-imports reports it; of another package it names no part."""
    name = imported if imported.startswith("stepfs") else imported.partition(".")[0]
    return f"{module} -> {name}" if imported else f"- {module}"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Contract → what lint-imports says of it in a copy with every breach at once."""
    copy = tmp_path_factory.mktemp("breached")
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        shutil.copytree(ROOT / package, copy / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for module, imported in (breach for breaches in BREACHES.values() for breach in breaches):
        planted = copy / f"{module.replace('.', '/')}.py"
        planted.parent.mkdir(exist_ok=True)
        with planted.open("a") as file:
            file.write(f"\nimport {imported}\n" if imported else "")
    done = ran(
        [Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache", "--no-logo"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200", "NO_COLOR": "1"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    broken = done.stdout.partition("\nBroken contracts\n")[2]
    parts: dict[str, str] = {}
    names = [line for line in broken.splitlines() if line in BREACHES]
    for name, following in zip(names, [*names[1:], None], strict=True):
        part = broken.partition(f"\n{name}\n")[2]
        parts[name] = part.partition(f"\n{following}\n")[0] if following else part
    return parts


def test_each_contract_has_a_planted_breach() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(BREACHES)


@pytest.mark.parametrize("contract", BREACHES)
def test_a_breach_is_reported(contract: str, said: dict[str, str]) -> None:
    assert contract in said, f"kept although it was breached; broken: {sorted(said)}"
    for module, imported in BREACHES[contract]:
        assert report_of(module, imported) in said[contract]
