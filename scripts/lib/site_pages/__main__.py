"""Builds the site into an empty, or a former, directory; every warning of mkdocs is an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from site_pages.menu import menu
from site_pages.messages import ROOT
from site_pages.pages import LinkError, Site

_HERE: Final = Path(__file__).parent
_NAMES: Final = {f"reference/{name}" for name in ("variables", "plan-keys", "metrics")}
_FIRST: Final = "---\nsearch: {boost: 2}\n---\n"  # for who types a name: before messages that have it, too
_MARK: Final = "sitemap.xml"  # of what mkdocs has built


def build(target: Path) -> None:
    """`LinkError` for a link that leads nowhere, with all lines of mkdocs if it is the one to find it."""
    site = Site(ROOT, menu())
    with tempfile.TemporaryDirectory(prefix="stepfs-site-") as name:
        work = Path(name)
        for place, text in site.texts():
            page = work / "docs" / f"{place}.md"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text((_FIRST if place in _NAMES else "") + text, encoding="utf-8")
        for place, picture in site.pictures.items():
            (work / "docs" / place).parent.mkdir(exist_ok=True)
            shutil.copy(picture, work / "docs" / place)
        shutil.copy(_HERE / "site.css", work / "docs")
        config = (_HERE / "mkdocs.yml").read_text()
        (work / "mkdocs.yml").write_text(f"{config}\nnav: {json.dumps(site.navigation(), ensure_ascii=False)}\n")
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target.absolute())]
        quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of the theme's successor, in colours, into every log
        done = subprocess.run(words, cwd=work, env=quiet, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:  # with --quiet it counts no warnings
        found = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        raise LinkError("mkdocs: " + "\n".join(line for line in found if line.strip()))


def main(arguments: list[str]) -> int:
    target = Path(*arguments)
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / _MARK).exists())):
        sys.stderr.write(f"site: {target} holds something else; name an empty directory\n")
        return 4
    try:
        target.mkdir(parents=True, exist_ok=True)
        build(target)
    except OSError as error:
        sys.stderr.write(f"site: {error.filename}: {error.strerror}; name a directory that can be written\n")
        return 1
    except LinkError as error:
        sys.stderr.write(f"site: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
