"""The files of a source: found by name, in directories, in buckets, by wildcards."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final
from urllib.parse import unquote, urlsplit

from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs_producer.sources.files import REMOTE, FoundFile, bucket_of, split_url

_MAGIC: Final = frozenset("*?[")
Found = tuple[str, str, int, str]  # path below the prefix, location, bytes, etag


def find_files(
    entries: Sequence[str],
    suffixes: Sequence[str],
    *,
    endpoint_url: str | None = None,
    profile: str | None = None,
) -> list[FoundFile]:
    """Files of all entries, sorted by name as UTF-8. Below directories only those that end in one of `suffixes`.

    `AbsentError` for an entry that does not exist, `RefusedError` for one that may not be read, `UsageError` for one
    that is neither file nor directory.
    """
    taken: dict[str, FoundFile] = {}
    for number, entry in enumerate(entries):
        found = (
            _objects(entry, suffixes, endpoint_url, profile) if entry.startswith(REMOTE) else _local(entry, suffixes)
        )
        matched = False
        for below, location, size, etag in found:
            matched = True
            taken.setdefault(location, FoundFile(f"{number}/{below}", location, size, etag))
        if not matched:
            endings = ", ".join(one for one in suffixes if one.startswith("."))  # others are names of what lies beside
            wanted = f" that end in {endings}" if suffixes and not _is_glob(entry) else ""
            raise AbsentError(f"{entry}: no files{wanted}; name files, a directory of them, or a glob that matches")
    files = sorted(taken.values(), key=lambda file: file.name.encode())
    for before, after in pairwise(files):
        if before.name == after.name:
            raise UsageError(f"{before.location} and {after.location} have the same printable name; rename one")
    return files


def _is_glob(entry: str) -> bool:
    return not _MAGIC.isdisjoint(entry)


def _before_wildcards(pattern: str) -> str:
    return pattern[: min(place for mark in _MAGIC if (place := pattern.find(mark)) >= 0)]


def _literal_prefix(pattern: str) -> str:
    """The components before the first one with a wildcard, with their '/'."""
    before = _before_wildcards(pattern)
    return before[: before.rfind("/") + 1]


def _local(entry: str, suffixes: Sequence[str]) -> Iterator[Found]:
    path = os.path.abspath(os.path.expanduser(_path_of(entry)))  # noqa: PTH100, PTH111  (resolve() follows links)
    if "\0" in path:
        raise UsageError(f"{entry!r}: not a path; name files, directories or globs")
    if _is_glob(path) and not os.path.lexists(path):
        prefix = _literal_prefix(path)
        for match in glob.iglob(path, recursive=True):  # noqa: PTH207
            yield from _at(match, suffixes, prefix)
        return
    is_directory = stat.S_ISDIR(_status(path).st_mode)
    yield from _at(path, suffixes, path if is_directory else os.path.dirname(path))  # noqa: PTH120


def _path_of(entry: str) -> str:
    scheme, _, rest = entry.partition("://")
    if scheme in {"http", "https"}:
        raise UsageError(
            f"{entry}: sources are files, or lie at s3://, gs://, az:// or hf://; fetch it first: curl -O {entry}"
        )
    if scheme != "file" or not rest:
        return entry
    parts = urlsplit(entry)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise UsageError(f"{entry!r} is not absolute; write file:///directory")
    return unquote(parts.path)


def _at(path: str, suffixes: Sequence[str], prefix: str) -> Iterator[Found]:
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        yield from _walk(path, suffixes, prefix)
    elif stat.S_ISREG(status.st_mode):
        yield _below(path, prefix), path, status.st_size, ""
    else:
        raise UsageError(f"{path}: neither a file nor a directory; name regular files or directories of them")


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentError(f"{path}: no such file or directory; name files that exist") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; make the file readable") from error


def _walk(root: str, suffixes: Sequence[str], prefix: str) -> Iterator[Found]:
    pending = [root]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            raise RefusedError(f"{directory}: {error.strerror}; make the directory readable") from error
        for entry in visible:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif _wanted(entry.name, suffixes):
                try:
                    status = entry.stat()
                except OSError:
                    if not entry.is_symlink():
                        raise
                    continue  # a dangling link is no file, and no reason to stop
                if stat.S_ISREG(status.st_mode):
                    yield _below(entry.path, prefix), entry.path, status.st_size, ""


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    return not suffixes or name.endswith(tuple(suffixes))


def _below(path: str, prefix: str) -> str:
    # A file name is any bytes; listings and positions carry it as UTF-8 text.
    return os.fsencode(os.path.relpath(path, prefix)).decode("utf-8", "backslashreplace")


def _objects(entry: str, suffixes: Sequence[str], endpoint_url: str | None, profile: str | None) -> Iterator[Found]:
    root, key = split_url(entry)
    bucket = bucket_of(root, endpoint_url, profile)
    if _is_glob(key):
        prefix = _literal_prefix(key)
        pattern = key[len(prefix) :].split("/")
        for found in bucket.list(_before_wildcards(key)):
            below = found.key[len(prefix) :]
            if not below.endswith("/") and _matches(below.split("/"), pattern):
                yield below, f"{root}/{found.key}", found.size, found.etag
        return
    prefix = key if not key or key.endswith("/") else f"{key}/"
    if key != prefix:
        first = next(bucket.list(key), None)  # the key itself is the first; what only begins so may be millions
        if first is not None and first.key == key:
            yield key.rpartition("/")[2], f"{root}/{key}", first.size, first.etag
            return
    for found in bucket.list(prefix):
        below = found.key.removeprefix(prefix)
        hidden = any(part.startswith(".") for part in below.split("/"))
        if not hidden and below[-1:] not in {"", "/"} and _wanted(below, suffixes):
            yield below, f"{root}/{found.key}", found.size, found.etag


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match paths as `glob` does: `**` is any directories, other wildcards stay within a name and skip hidden ones."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(
            _matches(parts[skipped:], pattern[1:] or ["*"])
            for skipped in range(len(parts))
            if not any(part.startswith(".") for part in parts[:skipped])
        )
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
