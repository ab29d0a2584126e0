"""Where `stepfs show` reads a payload from: a file, or a slice of a lake. Only the parts that it shows are read."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from stepfs.errors import AbsentError, CorruptError, RefusedError, UsageError

if TYPE_CHECKING:
    from stepfs.format.descriptor import SliceRef
    from stepfs.format.payload.excerpt import Excerpt
    from stepfs.store.api import Store

WHOLE_BYTES_MAX: Final = 64 << 20  # longer slices are read in parts, which no checksum covers


class PayloadBytes(Protocol):
    """A payload of `length` bytes."""

    @property
    def length(self) -> int: ...

    async def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), all of which the payload has."""
        ...


async def ends_of(payload: PayloadBytes) -> Excerpt:
    """The source of the arrays of a payload."""
    from stepfs.format.payload.excerpt import HEAD_BYTES_MAX, TAIL_BYTES_MAX, Excerpt

    tail = min(TAIL_BYTES_MAX, payload.length)
    head = await payload.read(0, min(HEAD_BYTES_MAX, payload.length))
    return Excerpt(
        memoryview(head), memoryview(await payload.read(payload.length - tail, tail)), payload.length
    )


@dataclass(frozen=True, slots=True)
class WholePayload:
    """In memory."""

    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)

    async def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]


@dataclass(frozen=True, slots=True)
class FilePayload:
    """A file, such as one of a mount."""

    path: Path
    length: int

    @classmethod
    def at(cls, path: Path) -> FilePayload:
        """`AbsentError`, `RefusedError`, `UsageError` for anything but a file: opening a FIFO waits for a writer."""
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise AbsentError(f"{path}: no such file; name one, or the URL of a lake") from error
        except OSError as error:
            raise RefusedError(f"{path}: {error.strerror or error}; name a readable file") from error
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: is not a regular file; name a file, or the URL of a lake")
        return cls(path, found.st_size)

    async def read(self, offset: int, size: int) -> bytes:
        import trio

        return await trio.to_thread.run_sync(self._read, offset, size, abandon_on_cancel=True)

    def _read(self, offset: int, size: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise RefusedError(f"{self.path}: {error.strerror or error}; name a readable file") from error


@dataclass(frozen=True, slots=True)
class SlicePayload:
    """A long slice, in ranges."""

    store: Store
    key: str
    ref: SliceRef

    @property
    def length(self) -> int:
        return self.ref.length

    async def read(self, offset: int, size: int) -> bytes:
        buffer = bytearray(size)
        got = (
            await self.store.read_into(self.key, self.ref.offset + offset, memoryview(buffer)) if size else 0
        )
        if got is None:
            raise CorruptError(f"{self.key} is missing; `stepfs verify` says what to do")
        if got < size:
            raise CorruptError(f"{self.key} is shorter than was committed; `stepfs verify` says what to do")
        return bytes(buffer)


async def slice_payload(store: Store, key: str, ref: SliceRef) -> PayloadBytes:
    """A slice. One that is read whole is verified: `CorruptError`."""
    from crc32c import crc32c

    payload = SlicePayload(store, key, ref)
    if ref.length > WHOLE_BYTES_MAX:
        return payload
    data = await payload.read(0, ref.length)
    if crc32c(data) != ref.crc32c:
        raise CorruptError(f"{key}: checksum mismatch; `stepfs verify` says what to do")
    return WholePayload(data)
