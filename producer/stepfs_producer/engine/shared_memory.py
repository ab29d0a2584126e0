"""Bodies of this machine: anonymous files in memory, written by one worker, then mapped by those that need them.

The command has the file open; workers find it as /proc/<command>/fd/<number>. So the kernel frees it when the command
ends, however it ends. Numbers are used again, so each file has a name of its own, compared after opening.

Arrays and `PickleBuffer`s lie in the file as they are, behind the pickle that names them, and are mapped without a copy.
A small body needs no file: its bytes pass through the command. Ray's store keeps the same parts.

Workers import this module, so nothing here may need trio.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from stepfs.errors import RefusedError

INLINE_BYTES_MAX: Final = 64 << 10
_ALIGNMENT: Final = 64  # of arrays; more than any dtype needs
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class BodyFile(NamedTuple):
    """A file's path on this machine, and its name among workers."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class StoredBody:
    """A stored body. `inline`: its pickle; else it is in `file`, a pickle and its buffers, of these sizes."""

    inline: bytes | None
    file: BodyFile | None = None
    sizes: tuple[int, ...] = ()


class BodyArgument(NamedTuple):
    """Stands for a body among the arguments of a pickled task: this one of those that come beside it."""

    number: int


class LostBodies(NamedTuple):
    """Which arguments of a task are lost, or which of the bodies beside it."""

    indices: tuple[int, ...]


class _LostBodyError(Exception):
    """The file is gone."""


def run_task(
    function: Callable[..., Any], arguments: tuple[object, ...], keep_in: BodyFile | None, *, keep: bool
) -> object:
    """Runs in a worker. Returns the result of `function`, or (head, `StoredBody`) of it if it is kept, or `LostBodies`.

    `keep_in`: the file for its body; None: no file can be had, and a body of any size returns.
    """
    found: list[object] = []
    lost = []
    for index, argument in enumerate(arguments):
        try:
            found.append(_load(argument) if isinstance(argument, StoredBody) else argument)
        except _LostBodyError:
            lost.append(index)
    if lost:
        return LostBodies(tuple(lost))
    result = function(*found)
    del found  # mappings, before the next task
    if not keep:
        return result
    head, body = result
    return head, _store(body, keep_in)


def parts_of(body: object) -> list[memoryview]:
    """Its pickle, and the buffers that lie behind it."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(body, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def body_of(parts: Sequence[memoryview]) -> object:
    """The body, of which arrays are views of its parts."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - written by a worker of this run


def _store(body: object, keep_in: BodyFile | None) -> StoredBody:
    parts = parts_of(body)
    if keep_in is None or sum(part.nbytes for part in parts) <= INLINE_BYTES_MAX:
        return StoredBody(pickle.dumps(body, protocol=pickle.HIGHEST_PROTOCOL))
    size = 0
    try:
        with os.fdopen(_open(keep_in, os.O_RDWR), "r+b") as file:
            for part in parts:
                file.seek(size)
                file.write(part)
                size += part.nbytes + -part.nbytes % _ALIGNMENT
            file.flush()
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise RefusedError(
            f"{sum(part.nbytes for part in parts)} bytes of samples find no room in memory ({error.strerror}); give less "
            "with --memory, fewer --workers or smaller blocks, or raise the limit of this user or container (ulimit -f, "
            "memory.max)"
        ) from error
    return StoredBody(None, keep_in, tuple(part.nbytes for part in parts))


def _load(stored: StoredBody) -> object:
    if stored.inline is not None:
        return pickle.loads(stored.inline)  # noqa: S301 - written by a worker of this run
    assert stored.file is not None
    descriptor = _open(stored.file, os.O_RDONLY)
    try:
        mapped = memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
    parts, begin = [], 0
    for size in stored.sizes:
        parts.append(mapped[begin : begin + size])
        begin += size + -size % _ALIGNMENT
    return body_of(parts)


def _open(file: BodyFile, flags: int) -> int:
    try:
        descriptor = os.open(file.path, flags | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _LostBodyError from error
    except PermissionError as error:
        raise RefusedError(
            f"{file.path}: {error.strerror}; a worker may not open files of its command: let processes of one user see "
            "each other under /proc (dumpable, no hidepid between them)"
        ) from error
    if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != f"/memfd:{file.name} (deleted)":
        os.close(descriptor)
        raise _LostBodyError
    return descriptor
