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

# Contract → the breaches planted against it: a new module, what it says, and how lint-imports reports it.
PLANTED = {
    "reading never imports writing": [
        ("stepfs/view/reads.py", "import stepfs_producer", "stepfs.view.reads -> stepfs_producer"),
    ],
    "rooms of stepfs, highest first": [
        (
            "stepfs/format/upwards.py",
            "import stepfs.mount.session",
            "stepfs.format.upwards -> stepfs.mount.session",
        ),
        ("stepfs/unnamed/__init__.py", "", "- stepfs.unnamed"),
        (
            "stepfs/reader/mounts.py",
            "import stepfs.mount.options",
            "stepfs.reader.mounts -> stepfs.mount.options",
        ),
        ("stepfs/mount/fuse/reads.py", "import stepfs.reader", "stepfs.mount.fuse.reads -> stepfs.reader"),
    ],
    "rooms of stepfs.lake, highest first": [
        (
            "stepfs/lake/log/upwards.py",
            "import stepfs.lake.reclaim",
            "stepfs.lake.log.upwards -> stepfs.lake.reclaim",
        ),
        ("stepfs/lake/unnamed.py", "", "- stepfs.lake.unnamed"),
    ],
    "rooms of stepfs.mount, highest first": [
        (
            "stepfs/mount/host/upwards.py",
            "import stepfs.mount.fuse",
            "stepfs.mount.host.upwards -> stepfs.mount.fuse",
        ),
        ("stepfs/mount/unnamed.py", "", "- stepfs.mount.unnamed"),
    ],
    "rooms of stepfs.reader, highest first": [
        ("stepfs/reader/unnamed.py", "", "- stepfs.reader.unnamed"),
    ],
    "rooms of stepfs.data.prefetch, highest first": [
        (
            "stepfs/data/prefetch/unnamed.py",
            "",
            "- stepfs.data.prefetch.unnamed",
        ),
    ],
    "rooms of stepfs.data, highest first": [
        (
            "stepfs/data/fetch/upwards.py",
            "import stepfs.data.slices",
            "stepfs.data.fetch.upwards -> stepfs.data.slices",
        ),
        ("stepfs/data/unnamed.py", "", "- stepfs.data.unnamed"),
    ],
    "rooms of stepfs_producer, highest first": [
        (
            "stepfs_producer/sources/upwards.py",
            "import stepfs_producer.rebase",
            "stepfs_producer.sources.upwards -> stepfs_producer.rebase",
        ),
        ("stepfs_producer/unnamed.py", "", "- stepfs_producer.unnamed"),
    ],
    "writing knows nothing of mounts": [
        (
            "stepfs_producer/cli/mounts.py",
            "import stepfs.mount",
            "stepfs_producer.cli.mounts -> stepfs.mount",
        ),
    ],
    "preparing data knows nothing of committing": [
        (
            f"stepfs_producer/{room}/commits.py",
            "import stepfs_producer.commit",
            f"stepfs_producer.{room}.commits -> stepfs_producer.commit",
        )
        for room in ("payloads", "plan", "sources", "transforms")
    ],
    "committing knows nothing of what it commits": [
        (
            "stepfs_producer/packs.py",
            "import stepfs_producer.plan",
            "stepfs_producer.packs -> stepfs_producer.plan",
        ),
    ],
    "the planner is pure": [
        ("stepfs_producer/plan/waits.py", "import trio", "stepfs_producer.plan.waits -> trio"),
        ("stepfs_producer/plan/pack/reads.py", "import os", "stepfs_producer.plan.pack.reads -> os"),
        (
            "stepfs_producer/plan/looks.py",
            "import stepfs.format.ids",
            "stepfs_producer.plan.looks -> stepfs.format.ids",
        ),
    ],
    "each optional library has one home": [
        (
            f"stepfs_producer/cli/borrows_{library}.py",
            f"import {library}",
            f"stepfs_producer.cli.borrows_{library} -> {library}",
        )
        for library in ("pyarrow", "pydantic", "ray", "trio_parallel", "yaml", "zstandard")
    ],
    "the kernel is known to stepfs.mount alone": [
        ("stepfs/data/kernel.py", "import pyfuse3", "stepfs.data.kernel -> pyfuse3"),
        ("stepfs/cli/kernel.py", "import sdnotify", "stepfs.cli.kernel -> sdnotify"),
    ],
    "S3 is known to stepfs.store.s3 alone": [
        ("stepfs/store/buckets.py", "import boto3", "stepfs.store.buckets -> boto3"),
        ("stepfs_producer/buckets.py", "import botocore.config", "stepfs_producer.buckets -> botocore"),
    ],
    "terminals are the command lines' business": [
        ("stepfs/doctor/prints.py", "import rich.table", "stepfs.doctor.prints -> rich"),
        ("stepfs_producer/sources/asks.py", "import typer", "stepfs_producer.sources.asks -> typer"),
    ],
    "torch stays out of the core": [
        ("stepfs/checkpoints/tensors.py", "import torch", "stepfs.checkpoints.tensors -> torch"),
    ],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Contract → what lint-imports says of it in a copy with every breach at once."""
    copy = tmp_path_factory.mktemp("breached")
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        shutil.copytree(
            ROOT / package, copy / Path(package).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", copy)
    for path, line, _ in (breach for breaches in PLANTED.values() for breach in breaches):
        planted = copy / path
        assert not planted.exists()
        planted.parent.mkdir(exist_ok=True)
        planted.write_text(line + "\n")
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
    names = [line for line in broken.splitlines() if line in PLANTED]
    for name, following in zip(names, [*names[1:], None], strict=True):
        part = broken.partition(f"\n{name}\n")[2]
        parts[name] = part.partition(f"\n{following}\n")[0] if following else part
    return parts


def test_each_contract_has_a_planted_breach() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(PLANTED)


@pytest.mark.parametrize("contract", PLANTED)
def test_a_breach_is_reported(contract: str, said: dict[str, str]) -> None:
    assert contract in said, f"kept although it was breached; broken: {sorted(said)}"
    for _, _, report in PLANTED[contract]:
        assert report in said[contract]
