"""`scripts/release`: equal bytes from any checkout, and nothing from a tree that is not what is committed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import tools

from release.__main__ import release
from release.build import build, build_twice
from release.dist import SUMS, publish
from release.inspection import inspect
from release.source import Source, source_of
from stepfs import __version__
from stepfs.errors import RefusedError, StepfsError, UsageError

COMMITTED = 1_700_000_000


def git(root, *arguments, **environment):
    identity = {"GIT_AUTHOR_DATE": f"{COMMITTED} +0000", "GIT_COMMITTER_DATE": f"{COMMITTED} +0000"}
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(root), *arguments],
        check=True,
        capture_output=True,
        env={**os.environ, **identity, **environment},
    )


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A small project with our pyproject.toml, in a git repository of its own."""
    root = tmp_path_factory.mktemp("release") / "checkout"
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        (root / package).mkdir(parents=True)
        (root / package / "py.typed").touch()
        (root / package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (root / "fs/schemas").mkdir()
    (root / "fs/schemas/ls.json").write_text("{}")
    (root / "fs/stepfs/cli.py").write_text("def main(): ...\n")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "constraints.lock.txt"):
        shutil.copy(tools.ROOT / name, root)
    git(root.parent, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "all")
    return root


@pytest.fixture
def checkout(committed, tmp_path):
    shutil.copytree(committed, tmp_path / "mine", symlinks=True)
    return tmp_path / "mine"


def test_two_checkouts_and_the_sdist_give_equal_bytes(committed, tmp_path, monkeypatch, capsys):
    other = tmp_path / "elsewhere, later"
    git(tmp_path, "clone", "-q", str(committed), str(other))
    for path in other.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    wheel = release(committed, tmp_path / "dist")
    release(other, tmp_path / "second")
    sums = (tmp_path / "dist" / SUMS).read_text()
    assert sums == (tmp_path / "second" / SUMS).read_text()
    assert f"SOURCE_DATE_EPOCH={COMMITTED}" in capsys.readouterr().out
    assert sorted(line.split()[1] for line in sums.splitlines()) == [
        "stepfs-1.2.3-py3-none-any.whl",
        "stepfs-1.2.3.tar.gz",
    ]
    for line in sums.splitlines():
        digest, name = line.split()
        assert hashlib.sha256((tmp_path / "dist" / name).read_bytes()).hexdigest() == digest
    with zipfile.ZipFile(wheel) as archive:
        assert {info.date_time[0] for info in archive.infolist()} == {2023}

    with tarfile.open(tmp_path / "dist/stepfs-1.2.3.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(COMMITTED))
    release(tmp_path / "unpacked/stepfs-1.2.3", tmp_path / "third")
    assert sums == (tmp_path / "third" / SUMS).read_text()


def test_a_build_that_depends_on_its_place_or_time_is_refused(checkout, tmp_path):
    settings = checkout / "pyproject.toml"
    settings.write_text(settings.read_text() + "\n[tool.hatch.build.targets.sdist]\nreproducible = false\n")
    with pytest.raises(StepfsError, match=r"stepfs-1\.2\.3\.tar\.gz is not reproducible"):
        build_twice(Source(checkout, None, COMMITTED), tmp_path / "work")


def test_this_tree_can_be_released(tmp_path):
    sdist, wheel = build_twice(Source(tools.ROOT, None, COMMITTED), tmp_path)
    assert str(inspect(sdist, wheel).version) == __version__


@pytest.mark.parametrize("change", ["changed", "untracked", "staged", "deleted"])
def test_what_is_not_committed_is_not_released(checkout, tmp_path, change):
    file = checkout / "fs/stepfs" / ("new.py" if change == "untracked" else "cli.py")
    if change == "deleted":
        file.unlink()
    else:
        file.write_text("import os\n")
    if change == "staged":
        git(checkout, "add", ".")
    with pytest.raises(RefusedError, match=rf"not what is committed: fs/stepfs/{file.name}; commit"):
        release(checkout, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("commit", ["HEAD", None])
def test_ignored_files_do_not_reach_a_release(checkout, tmp_path, commit):
    (checkout / "fs/stepfs/__pycache__").mkdir()
    (checkout / "fs/stepfs/__pycache__/secret.pyc").write_text("mine")
    (checkout / "dist").mkdir()
    (checkout / "dist/old.whl").write_text("old")
    Source(checkout, commit, COMMITTED).export(tmp_path / "exported")
    names = {path.name for path in (tmp_path / "exported").rglob("*")}
    assert "cli.py" in names
    assert not {"secret.pyc", "old.whl", ".git"} & names


def test_a_tree_without_history_must_be_told_its_time(checkout, monkeypatch):
    """Inside the repository of somebody else, too: its commit says nothing of this tree."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    inner = checkout / "vendored"
    shutil.copytree(checkout, inner, ignore=shutil.ignore_patterns(".git", "vendored"))
    for value in (None, "", "yesterday", "-1"):
        if value is not None:
            monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
        with pytest.raises(UsageError, match="no git checkout: set SOURCE_DATE_EPOCH"):
            source_of(inner)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1600000000")
    assert source_of(inner) == Source(inner, None, 1_600_000_000)


def test_the_commit_decides_not_the_environment(committed, monkeypatch, tmp_path):
    git(tmp_path, "init", "-q", str(tmp_path / "another"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another/.git"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text("[core]\n  autocrlf = true\n")
    source = source_of(committed)
    assert source.epoch == COMMITTED
    source.export(tmp_path / "exported")
    assert (tmp_path / "exported/fs/stepfs/cli.py").read_bytes() == b"def main(): ...\n"


def test_troubles_with_git_are_told(checkout, monkeypatch, tmp_path):
    shutil.rmtree(checkout / ".git/refs")
    with pytest.raises(StepfsError, match=r"git status: .*not a git repository"):
        source_of(checkout)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StepfsError, match="git is not installed"):
        source_of(checkout)


def test_what_cannot_be_built_says_why(checkout, tmp_path):
    (checkout / "fs/stepfs/__init__.py").write_text("version = 1\n")
    with pytest.raises(StepfsError, match=r"the wheel of .* cannot be built: ValueError: .*fs/stepfs/__init__.py$"):
        build(checkout, "wheel", tmp_path, COMMITTED)


def test_a_release_that_was_cut_short_has_no_sums(tmp_path, monkeypatch):
    dist, built = tmp_path / "dist", tmp_path / "a.whl"
    built.write_bytes(b"first")
    publish([built], dist)
    built.write_bytes(b"second")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupted)
        publish([built], dist)
    assert (dist / "a.whl").read_bytes() == b"first"
    assert not (dist / SUMS).exists()
    publish([built], dist)
    assert (dist / SUMS).read_text() == f"{hashlib.sha256(b'second').hexdigest()}  a.whl\n"


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def built(committed, tmp_path_factory):
    return build_twice(Source(committed, None, COMMITTED), tmp_path_factory.mktemp("built") / "work")


def test_a_foreign_file_in_the_wheel_is_found(built, tmp_path):
    sdist, wheel = built
    bad = Path(shutil.copy(wheel, tmp_path))
    with zipfile.ZipFile(bad, "a") as archive:
        archive.writestr("tests/__init__.py", "")
    with pytest.raises(StepfsError, match="holds what does not belong there: tests/__init__"):
        inspect(sdist, bad)


def test_a_missing_module_is_found(built, tmp_path):
    sdist, wheel = built
    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(bad, "w") as rest:
        for name in archive.namelist():
            if not name.endswith("cli.py"):
                rest.writestr(name, archive.read(name))
    with pytest.raises(StepfsError, match=r"lacks stepfs/cli\.py"):
        inspect(sdist, bad)


def test_metadata_that_an_index_refuses_is_found(checkout, tmp_path):
    settings = checkout / "pyproject.toml"
    text = settings.read_text()
    settings.write_text(text.replace('readme = "README.md"\n', ""))
    files = [build(checkout, target, tmp_path / "dist", COMMITTED) for target in ("sdist", "wheel")]
    with pytest.raises(StepfsError, match="metadata: no description"):
        inspect(*files)


def test_an_option_that_does_not_exist_is_a_usage_error():
    done = tools.ran("release", "--wrong")
    assert done.returncode == 2
    assert "usage: scripts/release" in done.stderr
