"""The files of a corpus, in an order that is the same in every process.

Names are relative to the common parent of all inputs, so a corpus may move, or be mounted elsewhere, between two
starts of a producer; they are sorted as UTF-8, never as the directory happens to return them. Hidden files and
directories found while walking are left out; inputs named on the command line are always taken.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stepfs.errors import AbsentError, RefusedError, UsageError


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file of a corpus."""

    name: str  # unique within the corpus; valid UTF-8 with '/' between components
    path: str
    named: bool  # given as an input itself: read even when it does not look like text


def list_sources(inputs: Sequence[str | Path]) -> tuple[SourceFile, ...]:
    """Every file in or under `inputs`, once, sorted by name.

    Directories are walked without following links to directories; files under a name beginning with a dot are left
    out. `AbsentError` for an input that does not exist, `UsageError` for one that is neither file nor directory.
    """
    if not inputs:
        raise UsageError("no input was named; give at least one file or directory of text")
    roots = [os.path.abspath(os.fspath(item)) for item in inputs]  # noqa: PTH100  (resolve() would follow links)
    found: dict[str, bool] = {}
    for root in roots:
        mode = _mode_of(root)
        if stat.S_ISDIR(mode):
            for path in _walk(root):
                found.setdefault(path, False)
        elif stat.S_ISREG(mode):
            found[root] = True
        else:
            raise UsageError(
                f"{root}: neither a file nor a directory; name regular files or directories of them"
            )
    base = _common_parent(roots)
    files = sorted(SourceFile(_name_of(path, base), path, named) for path, named in found.items())
    for before, after in pairwise(files):
        if before.name == after.name:
            raise UsageError(f"{before.path} and {after.path} have the same printable name; rename one")
    return tuple(files)


def _common_parent(roots: Sequence[str]) -> str:
    if len(roots) == 1:
        return roots[0] if os.path.isdir(roots[0]) else os.path.dirname(roots[0])  # noqa: PTH112, PTH120
    return os.path.commonpath([os.path.dirname(root) for root in roots])  # noqa: PTH120


def _name_of(path: str, base: str) -> str:
    # A file name is any bytes; positions and payloads carry it as UTF-8 text.
    return os.fsencode(os.path.relpath(path, base)).decode("utf-8", "backslashreplace")


def _mode_of(path: str) -> int:
    try:
        return os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentError(f"{path}: no such file or directory; name an input that exists") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; make the input readable") from error


def _walk(root: str) -> Iterator[str]:
    pending = [root]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            raise RefusedError(f"{directory}: {error.strerror}; make the input readable") from error
        pending += [entry.path for entry in visible if entry.is_dir(follow_symlinks=False)]
        yield from _regular(visible)


def _regular(entries: Iterable[os.DirEntry[str]]) -> Iterator[str]:
    for entry in entries:
        try:
            is_file = entry.is_file(follow_symlinks=True)  # a dangling link is no file, and no reason to stop
        except OSError:
            if not entry.is_symlink():
                raise
            continue  # a circular link, or a target that may not be searched
        if is_file:
            yield entry.path
