"""`scripts/release`: equal bytes from any checkout, and nothing from a tree that is not what is committed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import zipfile

import pytest
import tools

COMMITTED = 1_700_000_000
NOISE = """
import os
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
class Noise(BuildHookInterface):
    def initialize(self, version, build_data):
        with open(os.path.join(self.root, "noise"), "wb") as file:
            file.write(os.urandom(9))
        build_data["force_include"][file.name] = "stepfs/noise"
"""


def git(root, *arguments):
    identity = {"GIT_AUTHOR_DATE": f"{COMMITTED} +0000", "GIT_COMMITTER_DATE": f"{COMMITTED} +0000"}
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(root), *arguments],
        check=True, capture_output=True, env={**os.environ, **identity},
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    """A small project with our pyproject.toml and script, in a git repository of its own."""
    root = tmp_path / "checkout"
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (root / "fs/schemas").mkdir()
    (root / "fs/schemas/ls.json").write_text("{}")
    (root / "scripts").mkdir()
    for page in ("fs/GUIDE.md", "fs/JSON.md", "fs/OPERATIONS.md", "fs/SEMANTICS.md"):
        (root / page).write_text("a page\n")
    for page in ("producer/PAYLOADS.md", "producer/PLANNING.md"):
        (root / page).write_text("a page\n")
    (root / "scripts/setup").write_text("#!/bin/sh\n")
    (root / "scripts/setup").chmod(0o755)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "constraints.lock.txt", "scripts/release"):
        shutil.copy(tools.ROOT / name, root / name)
    (root / ".venv").symlink_to(tools.ROOT / ".venv")
    git(tmp_path, "init", "-q", str(root))
    (root / ".git/info/exclude").write_text(".venv\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "all")
    return root


def released(root, *options, **environment):
    return subprocess.run(
        [root / "scripts/release", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
def test_two_checkouts_and_the_sdist_give_equal_bytes(checkout, tmp_path):
    """Whatever the user's settings, ignored files and times of files are."""
    (checkout / "fs/stepfs/__pycache__").mkdir()
    (checkout / "fs/stepfs/__pycache__/secret.pyc").write_text("mine")
    done = released(checkout, GIT_DIR="/nowhere", SOURCE_DATE_EPOCH="1")
    assert done.returncode == 0, done.stderr
    sums = (checkout / "dist/SHA256SUMS").read_text()
    assert done.stdout == sums
    assert [line.split()[1] for line in sums.splitlines()] == ["stepfs-1.2.3-py3-none-any.whl", "stepfs-1.2.3.tar.gz"]
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=checkout / "dist", check=True)
    with zipfile.ZipFile(checkout / "dist/stepfs-1.2.3-py3-none-any.whl") as archive:
        assert {info.date_time[0] for info in archive.infolist()} == {2023}
        packages = {name for name in archive.namelist() if not re.search(r"\.dist-info/|^stepfs/pages/", name)}
    assert packages == {"stepfs/__init__.py", "stepfs/schemas/ls.json", "stepfs_producer/__init__.py"}

    with tarfile.open(checkout / "dist/stepfs-1.2.3.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked/stepfs-1.2.3"
    (unpacked / ".venv").symlink_to(tools.ROOT / ".venv")
    refused = released(unpacked, SOURCE_DATE_EPOCH="yesterday")
    assert (refused.returncode, "set SOURCE_DATE_EPOCH" in refused.stderr) == (2, True)
    assert released(unpacked, SOURCE_DATE_EPOCH=str(COMMITTED)).stdout == sums


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["changed", "untracked", "deleted"])
def test_what_is_not_committed_is_not_released(checkout, change):
    file = checkout / "fs/stepfs" / ("new.py" if change == "untracked" else "__init__.py")
    if change == "deleted":
        file.unlink()
    else:
        file.write_text("import os\n")
    done = released(checkout)
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert f"not what is committed: fs/stepfs/{file.name}; commit" in done.stderr
    assert not (checkout / "dist").exists()


@pytest.mark.nightly
def test_what_cannot_be_released_says_why(checkout):
    settings = checkout / "pyproject.toml"
    text = settings.read_text()
    settings.write_text(text + '\n[tool.hatch.build.targets.wheel.hooks.custom]\npath = "noise.py"\n')
    (checkout / "noise.py").write_text(NOISE)
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "each build differs")
    assert "stepfs-1.2.3-py3-none-any.whl is not reproducible" in released(checkout).stderr
    settings.write_text(text)
    (checkout / "fs/stepfs/__init__.py").write_text("version = 1\n")
    git(checkout, "commit", "-qam", "no version")
    done = released(checkout)
    assert (done.returncode, "release: ValueError" in done.stderr) == (1, True), done.stderr


@pytest.mark.nightly
def test_the_index_gets_links_that_hold_and_the_same_bytes_from_the_sdist(checkout):
    shutil.copytree(tools.ROOT / "scripts/lib/release_checks", checkout / "scripts/lib/release_checks")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "checks")
    done = released(checkout, "--links", "https://code.test/blob/v1.2.3")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(checkout / "dist/stepfs-1.2.3-py3-none-any.whl") as archive:
        metadata = archive.read("stepfs-1.2.3.dist-info/METADATA").decode()
    assert "](https://code.test/blob/v1.2.3/fs/GUIDE.md)" in metadata
    assert not re.search(r"\]\((?!https://)", metadata)
    assert "](fs/GUIDE.md)" in (checkout / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "said"), [
        (["--wrong"], "usage: scripts/release"), (["--links"], "--links: give the https://"), (["--links", "here"], "--links: give"),
        (["--links", "https://x.test", "--wrong"], "usage"),
    ],
)  # fmt: skip
def test_an_option_that_does_not_exist_is_a_usage_error(options, said):
    done = released(tools.ROOT, *options)
    assert (done.returncode, said in done.stderr) == (2, True)
