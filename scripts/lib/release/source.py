"""The sources of a release: the files of one commit, or of a tree without history, and the time they carry.

A build of the working tree would depend on files that git ignores or does not know. So a checkout must be clean, and the
commit is exported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs.errors import RefusedError, StepfsError, UsageError

_EPOCH: Final = "SOURCE_DATE_EPOCH"
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Source:
    """A tree to build; `epoch`: the time of all its files, in seconds since 1970."""

    root: Path
    commit: str | None
    epoch: int

    def export(self, directory: Path) -> None:
        """Write its files to the directory, which must not exist."""
        if self.commit is None:
            shutil.copytree(self.root, directory, symlinks=True, ignore=_ignored(self.root))
            return
        directory.mkdir(parents=True)
        archive = directory.with_name(f"{directory.name}.tar")
        # Settings of this user must not change a byte.
        _git(self.root, "-c", "core.autocrlf=false", "archive", "--output", str(archive), self.commit)
        subprocess.run(["tar", "-x", "-f", str(archive), "-C", str(directory)], check=True)
        archive.unlink()


def source_of(root: Path) -> Source:
    """The clean checkout, or the tree without history, at `root`.

    `RefusedError` for a checkout that differs from its commit, `UsageError` for a tree whose time is not given.
    """
    if not (root / ".git").exists():  # `git` would find the repository around an unpacked archive
        return Source(root, None, _given_epoch(root))
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:_SHOWN]) + (" …" if changed[_SHOWN:] else "")
        raise RefusedError(
            f"not what is committed: {names}; commit, stash or remove it, then run scripts/release again"
        )
    commit = _git(root, "rev-parse", "--verify", "HEAD^{commit}").strip()
    return Source(root, commit, int(_git(root, "show", "-s", "--format=%ct", commit)))


def _given_epoch(root: Path) -> int:
    given = os.environ.get(_EPOCH, "")
    if not given.isdecimal():
        raise UsageError(
            f"{root} is no git checkout: set {_EPOCH} to the time of its commit (git show -s --format=%ct), in seconds,"
            " so that every build of it is equal"
        )
    return int(given)


def _ignored(root: Path) -> Callable[[str, list[str]], set[str]]:
    listed = (root / ".gitignore").read_text().split() if (root / ".gitignore").exists() else []
    made = "PKG-INFO"  # of an sdist: the builder writes it anew
    return shutil.ignore_patterns(".git", made, *(pattern.strip("/") for pattern in listed))


def _git(root: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, env=environment
        )
    except FileNotFoundError:
        raise StepfsError(f"{root} is a git checkout, but git is not installed: install git") from None
    if done.returncode != 0:
        raise StepfsError(f"git {arguments[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
