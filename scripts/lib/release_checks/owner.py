"""What only the owner of the project can fill in, by name: `.github/RELEASING.md` is the list, and this refuses while it is open.

python -m release_checks.owner [TAG]        exit code 4, and a line for each that is missing
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

ROOT: Final = Path(__file__).parents[3]
URLS: Final = ("Source", "Issues", "Changelog", "Documentation")
_BOX: Final = re.compile(r"^- \[([ x])\] `(\w+)`: (.*)$", re.MULTILINE)
_REFUSED: Final = 4


def missing(root: Path, tag: str = "") -> list[str]:
    """`NAME: what is to be done` of each that is open, and of a tag that is not the version's."""
    found = {name: where for done, name, where in _BOX.findall(_text(root, ".github/RELEASING.md")) if done != "x"}
    lines = [f"{name}: {found.pop(name, '')}: {why}" for name, why in _wrong(root)]
    lines += [f"{name}: {where}: tick its box in .github/RELEASING.md" for name, where in found.items()]
    version = version_of(root)
    if tag and tag != f"v{version}":
        lines.append(f"tag: {tag} is not v{version}, the version of the tree")
    return [re.sub(r": +: ", ": ", line) for line in lines]


def version_of(root: Path) -> str:
    return next(
        one[1] for one in re.finditer(r'^__version__ = "(.+)"$', _text(root, "fs/stepfs/__init__.py"), re.MULTILINE)
    )


def _wrong(root: Path) -> Iterator[tuple[str, str]]:
    """(name, what is wrong in the file) of those that stand in the tree."""
    project = tomllib.loads(_text(root, "pyproject.toml"))["project"]
    if not any(one.get("name", "").strip() for one in project.get("authors", [])):
        yield "authors", "nobody is named"
    urls = project.get("urls", {})
    if wrong := [name for name in URLS if not _is_public(urls.get(name, ""))]:
        yield "urls", f"{', '.join(wrong)} missing, or no https:// address of a server"
    if not re.search(r"^Address: \S*(@|https://)\S+\.\w", _text(root, ".github/SECURITY.md"), re.MULTILINE):
        yield "address", "there is none"
    given = re.findall(rf"^## {re.escape(version_of(root))} \((.*)\)$", _text(root, "CHANGELOG.md"), re.MULTILINE)
    if not given or not _is_date(given[0]):
        yield "date", "the version has no date, as 2026-12-31"


def _is_public(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and "." in parts.netloc and not parts.netloc.endswith((".example", "example.com"))


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    open_ = missing(ROOT, *sys.argv[1:2])
    sys.stderr.writelines(f"release: {line}\n" for line in open_)
    sys.exit(_REFUSED if open_ else 0)
