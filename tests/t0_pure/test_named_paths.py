"""What the documents and the tools' comments say of where tests are, can be found there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("fs/*.md"),
        *ROOT.glob("producer/*.md"),
        *ROOT.glob("scripts/*"),
    ]
    if path.is_file() and path.name != "CHANGELOG.md"  # which tells of the past
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_path_below_tests_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"\btests/[\w./]*\w", page.read_text()))
    kept = {name for name in named if "__pycache__" not in name}  # a cache is there or not by luck
    assert not {name for name in kept if not (ROOT / name).exists()}
