"""The quickstart's exactly-once check finds what it is there to find."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.records import Shard, TextSource
from stepfs_producer.text.steps import Shape, TextPosition, text_steps
from stepfs_producer.transforms.tokenize import ByteTokenizer


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("quickstart.audit")


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path]:
    """(a tree of steps as a mount shows it, the sources they were made of)."""
    corpus, tree = tmp_path / "corpus", tmp_path / "tree"
    corpus.mkdir()
    (corpus / "cache.pyc").write_bytes(b"\0binary")
    (corpus / "empty.txt").touch()
    for n in range(9):
        (corpus / f"{n}.txt").write_bytes(bytes(range(48, 58)) * (n + 1) * 3)
    parts = [Shard(n, 2) for n in range(2)]
    sources = [TextSource(list_sources([corpus]), shard=part) for part in parts]
    number = 0
    for part, source in zip(parts, sources, strict=True):
        shape = Shape(2, 1, 32, ".safetensors")
        for step in text_steps(source, ByteTokenizer(), shape, TextPosition(part, "bytes")):
            directory = tree / f"step-{number:09d}"
            directory.mkdir(parents=True)
            for rank, payload in enumerate(step.payloads):
                (directory / f"rank-{rank:05d}.safetensors").write_bytes(payload)
            number += 1
    return tree, corpus


def test_what_was_published_once_passes(script: ModuleType, published: tuple[Path, Path]) -> None:
    tree, corpus = published
    result = script.audit(tree, [corpus])
    assert result.faults == ()
    assert (result.documents, result.source_bytes) == (9, 30 * 45)
    assert result.files == 2 * result.steps


def test_a_lost_step_is_found(script: ModuleType, published: tuple[Path, Path]) -> None:
    tree, corpus = published
    shutil.rmtree(sorted(tree.iterdir())[3])
    faults = script.audit(tree, [corpus]).faults
    assert faults[0] == "step 3 is missing"
    assert any("missing" in fault or "ends at byte" in fault for fault in faults[1:])


def test_a_step_published_twice_is_found(script: ModuleType, published: tuple[Path, Path]) -> None:
    tree, corpus = published
    steps = sorted(tree.iterdir())
    shutil.copytree(steps[2], tree / f"step-{len(steps):09d}")
    assert any("twice" in fault for fault in script.audit(tree, [corpus]).faults)


def test_other_bytes_are_found(script: ModuleType, published: tuple[Path, Path]) -> None:
    tree, corpus = published
    (corpus / "4.txt").write_bytes(b"x" * 150)
    (corpus / "new.txt").write_bytes(b"never published")
    (corpus / "5.txt").unlink()
    assert sorted(script.audit(tree, [corpus]).faults) == [
        "4.txt: other bytes than in the source",
        "5.txt: not among the sources",
        "new.txt: ends at byte 0 of 15",
    ]
