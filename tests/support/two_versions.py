"""Two versions of the packages: this tree, and a copy of it with edits that a release might make."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
NOW, LATER = "0.1.0", "0.2.0"
Edits = Mapping[str, Sequence[tuple[str, str]]]  # module of stepfs, as a path → (text, what is in its place)


def write_trees(directory: Path, edits: Edits) -> None:
    """A folder for each, with `fs` and `producer` in it."""
    for version, changes in ((NOW, {}), (LATER, edits)):
        tree = directory / version
        for package in ("fs", "producer"):
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        init = tree / "fs/stepfs/__init__.py"
        init.write_text(re.sub('__version__ = ".*"', f'__version__ = "{version}"', init.read_text()))
        for name, pairs in changes.items():
            path = tree / f"fs/stepfs/{name}.py"
            text = path.read_text()
            for old, new in pairs:
                assert old in text, (name, old)
                text = text.replace(old, new)
            path.write_text(text)


def stale(edits: Edits) -> list[tuple[str, str]]:
    """Edits of what is not there any more: a push that renames a room would break the night's tests without a word."""
    texts = {name: (ROOT / f"fs/stepfs/{name}.py").read_text() for name in edits}
    return [(name, old) for name, pairs in edits.items() for old, _ in pairs if old not in texts[name]]


def version_of(mount: Path) -> str:
    found = re.search('version="([^"]+)"', (mount / ".stepfs/metrics").read_text())
    assert found is not None
    return found[1]


def shown(mount: Path, name: str) -> Any:
    return json.loads((mount / f".stepfs/{name}.json").read_text())
