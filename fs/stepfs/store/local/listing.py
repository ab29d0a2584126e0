"""Listing a directory tree in the order of an S3 LIST: by bytes of the whole key, lazily, from any point.

Sorting the children of one directory by name, with '/' appended to directories, gives exactly that order, so a
depth-first walk never needs the whole tree. A directory of 10^6 names costs one pass over its names; files are
`stat`ed only when they are part of the answer. Rejected: remembering a directory's sorted names by its mtime (a
change within one timestamp tick would go unseen).
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from stepfs.store.api import Entry


def list_keys(root: Path, prefix: str, after: str, limit: int | None, *, now_s: float | None = None) -> list[Entry]:
    """Regular files under `root` whose relative path starts with `prefix` and is > `after`.

    `now_s` is the file system's time, for ages: the seconds since the inode last changed. That is when the name was
    linked, or later. Not the mtime: it is old if a writer was stopped between writing and linking, and any process can
    set it. Hidden names, symbolic links and files that vanish meanwhile are left out. OSErrors other than absence
    pass.
    """
    base, _, rest = prefix.rpartition("/")
    start = f"{base}/" if base else ""
    return list(islice(_walk(root, start, rest, after, limit, now_s), limit))


def _walk(root: Path, base: str, starts: str, after: str, limit: int | None, now_s: float | None) -> Iterator[Entry]:
    for child in _in_order(_children(root / base, base, starts, after), limit):
        if child.endswith("/"):
            yield from _walk(root, child, "", after, limit, now_s)
            continue
        try:
            found = os.stat(root / child, follow_symlinks=False)  # noqa: PTH116 (a Path costs 2 x here)
        except FileNotFoundError:
            continue
        yield Entry(child, found.st_size, 0.0 if now_s is None else max(0.0, now_s - found.st_ctime))


def _in_order(children: list[str], limit: int | None) -> Iterator[str]:
    """A heap when the answer is short (it may need more than `limit`: files vanish, directories are empty)."""
    if limit is None:
        children.sort()
        yield from children
        return
    heapq.heapify(children)
    while children:
        yield heapq.heappop(children)


def _children(directory: Path, base: str, starts: str, after: str) -> list[str]:
    """Keys of files, and prefixes ('…/') of directories, that can contribute."""
    found: list[str] = []
    try:
        scan = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    with scan:
        for child in scan:
            name = child.name
            if name[0] == "." or not name.startswith(starts):
                continue
            key = base + name
            if child.is_file(follow_symlinks=False):
                if key > after:
                    found.append(key)
            elif child.is_dir(follow_symlinks=False):
                key += "/"
                if key > after or after.startswith(key):
                    found.append(key)
    return found
