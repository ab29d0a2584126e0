"""Where a command reads a payload from: a file, or a slice of a lake. Only the parts that it needs are read."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepfs.errors import AbsentError, CorruptError, RefusedError, UsageError

if TYPE_CHECKING:
    from stepfs.format.descriptor import SliceRef
    from stepfs.format.payload.excerpt import Excerpt
    from stepfs.store.api import Store

WHOLE_BYTES_MAX: Final = 64 << 20  # longer slices are read in parts, which no checksum covers


@dataclass(frozen=True, slots=True)
class PayloadBytes:
    """A payload of `length` bytes. `read(offset, size)`: bytes [offset, offset + size), all of which it has."""

    length: int
    read: Callable[[int, int], Awaitable[bytes]]


async def ends_of(payload: PayloadBytes) -> Excerpt:
    """The source of the arrays of a payload."""
    from stepfs.format.payload.excerpt import HEAD_BYTES_MAX, TAIL_BYTES_MAX, Excerpt

    tail = min(TAIL_BYTES_MAX, payload.length)
    head = await payload.read(0, min(HEAD_BYTES_MAX, payload.length))
    return Excerpt(memoryview(head), memoryview(await payload.read(payload.length - tail, tail)), payload.length)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """`AbsentError`, `RefusedError` for an error of the file system."""
    try:
        yield
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such file; name one that exists, or the URL of a lake") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or error}; name a readable file") from error


def file_bytes(path: Path) -> PayloadBytes:
    """A file, such as one of a mount. `UsageError` for anything but a file: opening a FIFO waits for a writer."""
    with reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path}: is not a regular file; name a file that holds one payload")

    def read(offset: int, size: int) -> bytes:
        with reading(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    async def read_in_thread(offset: int, size: int) -> bytes:
        import trio

        return await trio.to_thread.run_sync(read, offset, size, abandon_on_cancel=True)

    return PayloadBytes(found.st_size, read_in_thread)


async def slice_bytes(store: Store, key: str, ref: SliceRef) -> PayloadBytes:
    """A slice. One that is read whole is verified: `CorruptError`."""
    from crc32c import crc32c

    async def read(offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        got = await store.read_into(key, ref.offset + offset, memoryview(buffer)) if size else 0
        if got is None:
            raise CorruptError(f"{key} is missing; `stepfs verify` says what to do")
        if got < size:
            raise CorruptError(f"{key} is shorter than was committed; `stepfs verify` says what to do")
        return bytes(buffer)

    if ref.length > WHOLE_BYTES_MAX:
        return PayloadBytes(ref.length, read)
    data = await read(0, ref.length)
    if crc32c(data) != ref.crc32c:
        raise CorruptError(f"{key}: checksum mismatch; `stepfs verify` says what to do")

    async def read_again(offset: int, size: int) -> bytes:
        return data[offset : offset + size]

    return PayloadBytes(ref.length, read_again)
