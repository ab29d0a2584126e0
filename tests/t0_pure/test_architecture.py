"""The house as its page describes it: every folder says what lives there, and the page names every room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "fs/ARCHITECTURE.md").read_text()
PACKAGES = [ROOT / "fs/stepfs", ROOT / "producer/stepfs_producer"]
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
FOLDERS = sorted({path.parent for path in SOURCES})
FILES_MAX = 16
TOP_FOLDERS_MAX = 12
LINES_MAX = 300


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_in_one_line_what_lives_there_and_holds_few_files(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert re.search(r"[.:;]", said.partition("\n")[0]), "no sentence"
    assert len(list(folder.glob("*.py"))) <= FILES_MAX


def test_few_folders_stand_side_by_side() -> None:
    assert len({path.parent for path in SOURCES if path.parent.parent == PACKAGES[0]}) <= TOP_FOLDERS_MAX


def test_a_file_is_read_in_one_sitting() -> None:
    assert not {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > LINES_MAX
    }


def test_the_page_names_every_room_of_the_reading_side() -> None:
    rooms = {f"`{folder.relative_to(PACKAGES[0])}/`" for folder in FOLDERS if PACKAGES[0] in folder.parents}
    assert not {room for room in rooms if room not in PAGE}


def test_the_answers_of_the_page_exist() -> None:
    answers = re.findall(r"^\d+\. .*\? `([\w/]+\.py)`$", PAGE, re.MULTILINE)
    assert len(answers) == 20
    named = {name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not name.startswith("tests/")}
    homes = (PACKAGES[0], PACKAGES[1].parent)
    assert not {name for name in named if not any((home / name).exists() for home in homes)}
