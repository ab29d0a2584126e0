"""Fixtures of several tests of commands."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from lakes import SLICES, commit, stepfs
from planned_lake import ONE_PLAN_STEPS, made
from plans import plan_in
from threadengine import use_threads


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    """Workers of a run in this process are threads: a start of one takes a second. Runs as programs have processes.
    And versions of packages, which each run keeps, are parsed once, and windows of a verification are small.
    """
    with pytest.MonkeyPatch.context() as patch:
        use_threads(patch)
        patch.setattr("stepfs_producer.run.lake.version", functools.cache(version))
        patch.setattr("stepfs.lake.verify.data.WINDOW_BYTES", 256 << 10)
        yield


@pytest.fixture
def lake(file_url: str) -> str:
    """Five steps by two producers."""
    assert stepfs("init", file_url, "--slices", SLICES).code == 0
    commit(file_url, range(3))
    commit(file_url, range(3, 5), producer_id="tok-1")
    return file_url


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return plan_in(tmp_path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Thirty files of text, some of them empty."""
    root = tmp_path / "corpus"
    root.mkdir()
    for n in range(30):
        (root / f"{n:02d}.txt").write_text(f"document {n} says hello\n" * (n * 7 % 40))
    return root


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small planned lake beside its plan and corpus; tests copy it (`here`)."""
    directory = tmp_path_factory.mktemp("original")
    for steps in (4, 9, ONE_PLAN_STEPS):  # three commits at least
        made(directory, steps=steps)
    return directory


@pytest.fixture
def here(original: Path, tmp_path: Path) -> Path:
    """A copy of plan, corpus and lake."""
    return shutil.copytree(original, tmp_path / "copy")
