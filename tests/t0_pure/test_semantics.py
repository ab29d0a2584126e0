"""`fs/SEMANTICS.md` names a test for every promise; here those names are held to exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "fs/SEMANTICS.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    written = set()
    for path in [
        *(ROOT / "tests/t3_unmounted").rglob("test_*.py"),
        *(ROOT / "tests/t4_mount").glob("test_*.py"),
    ]:
        written |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert named <= written, sorted(named - written)
    promises = re.split(r"^(?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(promise.partition(".")[0]) for promise in promises] == list(range(1, len(promises) + 1))
    assert [promise for promise in promises if "`test_" not in promise] == []
