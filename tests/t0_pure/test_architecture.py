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

HOMES = (PACKAGES[0], PACKAGES[1].parent)
QUESTIONS = {  # of a newcomer, to be answered from folder and file names alone
    "Where is the eviction order decided?": "data/cache/eviction.py",
    "Who retries a lost create?": "lake/slots.py",
    "What runs when a checkpoint appears in a directory?": "checkpoints/watch.py",
    "Which files does a data rank of another mesh read?": "view/ranks.py",
    "What does the daemon do when its loop is stuck?": "mount/health/watchdog.py",
    "Which records do the tokens of a step come from?": "lake/lineage.py",
    "Which objects may a reclaim delete?": "lake/reclaim/plan.py",
    "How often does a mount look for new steps?": "follow/poll_interval.py",
    "Who decides how many GETs run at once?": "data/fetch/concurrency.py",
    "Which steps hold a record?": "stepfs_producer/run/history/find.py",
    "What clears the mount point of a killed daemon?": "mount/host/mountpoint.py",
    "When does a producer try its next commit?": "stepfs_producer/pace.py",
    "Where is an old incarnation of a producer refused?": "stepfs_producer/rebase.py",
    "Where does a failed request to Google or Azure become our error?": "store/cloud/answers.py",
    "What does a planned run wait for most?": "stepfs_producer/run/measured/bottleneck.py",
    "When may a group's change or an advance be recorded?": "lake/decisions.py",
    "Who gives the task of a worker that hangs to another?": "stepfs_producer/engine/failover.py",
    "What pushes bytes into the page cache?": "data/pagecache/primer.py",
    "When does a producer wait for trainers that are behind?": "stepfs_producer/lead/limit.py",
    "Where does a slice become idle, consumed or wanted again?": "data/roles.py",
}


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


def test_the_files_that_the_page_names_exist() -> None:
    named = {name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not name.startswith("tests/")}
    assert not {name for name in named if not any((home / name).exists() for home in HOMES)}


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_a_question_is_answered_by_the_name_of_a_file(question: str, answer: str) -> None:
    assert any((home / answer).exists() for home in HOMES), question
