"""Every import contract of pyproject.toml fails when it is breached: shown on a copy of both packages.

A contract with a wrong module name, or one too lenient exception, would be kept for ever.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Contract → the breaches planted against it: modules, and what each imports, if anything.
BREACHES = {
    "reading never imports writing": [("stepfs.view.reads", "stepfs_producer")],
    "rooms of stepfs, highest first": [
        ("stepfs.format.upwards", "stepfs.mount.session"),
        ("stepfs.unnamed", ""),
        ("stepfs.reader.mounts", "stepfs.mount.options"),
        ("stepfs.mount.fuse.reads", "stepfs.reader"),
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
    "rooms of stepfs.data.prefetch, highest first": [("stepfs.data.prefetch.unnamed", "")],
    "rooms of stepfs.data, highest first": [
        ("stepfs.data.fetch.upwards", "stepfs.data.slices"),
        ("stepfs.data.unnamed", ""),
    ],
    "rooms of stepfs_producer, highest first": [
        ("stepfs_producer.sources.upwards", "stepfs_producer.rebase"),
        ("stepfs_producer.unnamed", ""),
    ],
    "writing knows nothing of mounts": [("stepfs_producer.cli.mounts", "stepfs.mount")],
    "no library stands on a command": [
        ("stepfs_producer.run.prints", "stepfs.cli.failure"),
        ("stepfs_producer.plan.opens", "stepfs.cli"),
    ],
    "preparing data knows nothing of committing": [
        (f"stepfs_producer.{room}.commits", "stepfs_producer.commit")
        for room in ("payloads", "plan", "sources", "transforms")
    ],
    "committing knows nothing of what it commits": [("stepfs_producer.packs", "stepfs_producer.plan")],
    "the planner is pure": [
        ("stepfs_producer.plan.waits", "trio"),
        ("stepfs_producer.plan.balance.reads", "os"),
        ("stepfs_producer.plan.looks", "stepfs.format.ids"),
    ],
    "each optional library has one home": [
        (f"stepfs_producer.cli.borrows_{library}", library)
        for library in ("PIL", "pyarrow", "pydantic", "ray", "trio_parallel", "yaml", "zstandard")
    ],
    "the kernel is known to stepfs.mount alone": [
        ("stepfs.data.kernel", "pyfuse3"),
        ("stepfs.cli.kernel", "sdnotify"),
    ],
    "S3 is known to stepfs.store.s3 alone": [
        ("stepfs.store.buckets", "boto3"),
        ("stepfs_producer.buckets", "botocore.config"),
    ],
    "obstore is known to stepfs.store.cloud alone": [
        ("stepfs.store.s3.clouds", "obstore"),
    ],
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
        shutil.copytree(
            ROOT / package, copy / Path(package).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", copy)
    for module, imported in (breach for breaches in BREACHES.values() for breach in breaches):
        planted = copy / f"{module.replace('.', '/')}.py"
        assert not planted.exists()
        planted.parent.mkdir(exist_ok=True)
        planted.write_text(f"import {imported}\n" if imported else "")
    done = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache", "--no-logo"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
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
