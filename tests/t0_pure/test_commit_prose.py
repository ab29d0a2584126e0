"""COMMIT.md names tests as its evidence; they have to exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_prose_names_exists() -> None:
    prose = (ROOT / "producer" / "COMMIT.md").read_text()
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", prose))
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(named) > 10
    assert named <= tests
