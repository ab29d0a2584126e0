"""What only the owner can fill in is refused by name while it is open, and nothing is published before."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tools
import yaml

from release_checks import owner
from release_checks.readme import rebased
from stepfs import __version__

LIST = (tools.ROOT / ".github/RELEASING.md").read_text()
FILES = (".github/RELEASING.md", ".github/SECURITY.md", "CHANGELOG.md", "pyproject.toml", "fs/stepfs/__init__.py")
NAMES = re.findall(r"^- \[ \] `(\w+)`", LIST, re.MULTILINE)
WORKFLOW = yaml.safe_load((tools.ROOT / ".github/workflows/release.yml").read_text())
URLS = "".join(f'{name} = "https://code.stepfs.test/{name}"\n' for name in owner.URLS)


def changed(root: Path, name: str, old: str, new: str) -> None:
    text, count = re.subn(old, new, (root / name).read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, old
    (root / name).write_text(text)


@pytest.fixture
def filled_in(tmp_path: Path) -> Path:
    """A tree in which the owner has done all."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tools.ROOT / name, tmp_path / name)
    (tmp_path / FILES[0]).write_text(LIST.replace("- [ ]", "- [x]"))
    changed(tmp_path, "pyproject.toml", r"^\[project.urls\]\n", f"[project.urls]\n{URLS}")
    changed(tmp_path, "pyproject.toml", r"^readme = ", 'authors = [{name = "An Owner"}]\nreadme = ')
    changed(tmp_path, ".github/SECURITY.md", r"^Address: .*$", "Address: security@stepfs.test")
    changed(tmp_path, "CHANGELOG.md", rf"^## {__version__} \(.*\)$", f"## {__version__} (2026-12-31)")
    return tmp_path


def test_this_tree_names_all_that_is_open():
    found = [line.partition(":")[0] for line in owner.missing(tools.ROOT)]
    assert sorted(found) == sorted(NAMES)
    assert len(NAMES) == 8


def test_nothing_is_missing_once_all_is_filled_in(filled_in):
    assert owner.missing(filled_in, f"v{__version__}") == []
    assert owner.missing(filled_in, "v9.9.9") == [f"tag: v9.9.9 is not v{__version__}, the version of the tree"]


@pytest.mark.parametrize(
    ("name", "file", "old", "new"), [
        ("authors", "pyproject.toml", r"An Owner", " "), ("authors", "pyproject.toml", r"^authors = .*\n", ""),
        ("urls", "pyproject.toml", r"^Issues = .*\n", ""), ("urls", "pyproject.toml", r"https://code.stepfs.test/Source", "http://x.test"),
        ("urls", "pyproject.toml", r"code.stepfs.test/Changelog", "stepfs.example/Changelog"),
        ("address", ".github/SECURITY.md", r"security@stepfs.test", "the owner"), ("address", ".github/SECURITY.md", r"^Address: .*\n", ""),
        ("date", "CHANGELOG.md", r"2026-12-31", "unreleased"), ("date", "CHANGELOG.md", r"2026-12-31", "2026-13-01"),
        ("date", "fs/stepfs/__init__.py", rf'"{re.escape(__version__)}"', '"9.9.9"'),
        *((name, ".github/RELEASING.md", rf"- \[x\] `{name}`", f"- [ ] `{name}`") for name in NAMES),
    ],
)  # fmt: skip
def test_each_is_named_that_is_open(filled_in, name, file, old, new):
    changed(filled_in, file, old, new)
    (line,) = owner.missing(filled_in)
    assert line.startswith(f"{name}: ")
    assert ": : " not in line


def test_the_command_ends_with_the_code_of_what_is_refused():
    done = tools.ran("release_checks.owner", "v0.0.0")
    assert (done.returncode, done.stderr.count("\n")) == (4, len(NAMES) + 1)
    assert "release: tag: v0.0.0 is not" in done.stderr


def test_nothing_is_published_before_the_list_is_checked_and_the_bytes_are_equal():
    jobs = WORKFLOW["jobs"]
    steps = jobs["build"]["steps"]
    at = {
        word: next(i for i, step in enumerate(steps) if word in str(step))
        for word in ("release_checks.owner", "scripts/release")
    }
    assert at["release_checks.owner"] < at["scripts/release"]
    assert "continue-on-error" not in str(WORKFLOW)
    order = ["build", "compare", "publish", "image"]
    assert [*jobs] == order
    assert [jobs[job].get("needs") for job in order] == [None, "build", "compare", "publish"]
    for job in ("publish", "image"):
        assert jobs[job]["if"] == "github.ref_type == 'tag'"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {job for job in order if jobs[job].get("permissions", {}).get("id-token")} == {"publish", "image"}
    assert "password" not in str(jobs["publish"]).lower()
    assert "secrets." not in str(WORKFLOW)


@pytest.mark.parametrize(
    ("text", "made"), [
        ("[a](fs/GUIDE.md#b)", "[a](https://x.test/blob/v1/fs/GUIDE.md#b)"), ("[a](https://y.test)", "[a](https://y.test)"),
        ("![a [b]](.github/p.png)", "![a [b]](https://x.test/blob/v1/.github/p.png?raw=true)"), ("[a](#b)", "[a](#b)"),
        ("[a](b.md), [c](d.md)", "[a](https://x.test/blob/v1/b.md), [c](https://x.test/blob/v1/d.md)"),
    ],
)  # fmt: skip
def test_links_of_the_readme_hold_on_another_server(text, made):
    assert rebased(text, "https://x.test/blob/v1/") == made
    assert rebased(made, "https://z.test") == made, "an sdist is built again"


def test_no_relative_link_of_the_readme_is_left(tmp_path):
    page = tmp_path / "README.md"
    shutil.copy(tools.ROOT / "README.md", page)
    script = tools.ROOT / "scripts/lib/release_checks/readme.py"
    subprocess.run([sys.executable, script, "https://x.test/blob/v1", page], check=True)
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert len(targets) > 15
    assert [target for target in targets if not target.startswith("https://")] == []
    assert (
        page.read_text().replace("https://x.test/blob/v1/", "").replace("?raw=true", "")
        == (tools.ROOT / "README.md").read_text()
    )
