"""The bytes of a read: collected, or in a buffer whose owner may abandon it at any moment.

Bytes land under a lock that `abandon` takes, and the owner may checksum them while they are still in the CPU's cache.
Once `abandon` has returned, no byte is written to the buffer any more, and the connection is shut down so that the
thread ends at once instead of at its timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from stepfs.errors import CorruptError
from stepfs.store.api import Progress

PIECE_BYTES: Final = 1 << 20  # fits into a CPU's cache


def whole_body(
    pieces: Iterable[bytes], size: int, bytes_max: int, what: str, sign_of_life: Callable[[], None]
) -> bytes:
    """The body of `what`, an object of `size` bytes; `CorruptError` before the first piece if it is too large.

    `size` 0: the server did not say; then `CorruptError` as soon as it is too large.
    """
    if size > bytes_max:
        raise CorruptError(f"{what} has {size} bytes, at most {bytes_max} make sense")
    found, got = [], 0
    for piece in pieces:
        found.append(piece)
        got += len(piece)
        if got > bytes_max:
            raise CorruptError(f"{what} has more than {bytes_max} bytes, which make no sense")
        sign_of_life()
    return found[0] if len(found) == 1 else b"".join(found)


class AbandonedReadError(Exception):
    """The owner has abandoned the buffer; no caller sees this error."""


class ReadTarget:
    """The caller's buffer, filled from the front by one thread at a time."""

    def __init__(
        self, buffer: memoryview, landed: Progress, on_sign_of_life: Callable[[], None] = lambda: None
    ) -> None:
        self._buffer = buffer.cast("B")
        self._sign_of_life = on_sign_of_life
        self._landed = landed
        self._filling = threading.Lock()
        self._ending = threading.Lock()  # held for moments only, so `abandon` never waits for a connection
        self._end: Callable[[], object] | None = None
        self._abandoned = False
        self.done = 0
        self.answers = 0  # responses that began

    @property
    def remaining(self) -> int:
        return len(self._buffer) - self.done

    def check(self) -> None:
        if self._abandoned:
            raise AbandonedReadError

    @contextmanager
    def connected(self, end: Callable[[], object]) -> Iterator[None]:
        """Within, `abandon` calls `end` to wake the thread. Raises on leaving, too, if that may have happened."""
        with self._ending:
            self._end = end
        try:
            self.check()
            yield
        finally:
            with self._ending:
                self._end = None
        self.check()

    def append(self, piece: bytes) -> None:
        with self._filling:
            self.check()
            if len(piece) > self.remaining:
                raise ConnectionError("the server sent more bytes than it was asked for")
            self._buffer[self.done : self.done + len(piece)] = piece
            self._add(len(piece))
        self._sign_of_life()

    def receive(self, receive: Callable[[memoryview], int]) -> None:
        """The next piece by calls that fill a view from its front. They may block, because `abandon` ends them."""
        with self._filling:
            self.check()
            room = self._buffer[self.done : self.done + PIECE_BYTES]
            got = 0
            try:
                while got < len(room):
                    count = receive(room[got:])
                    if not count:
                        raise ConnectionResetError("the connection ended in the body")
                    got += count
                    self._sign_of_life()
            finally:
                if got:
                    self._add(got)

    def _add(self, count: int) -> None:
        self.done += count
        self._landed(self.done)

    def abandon(self) -> None:
        """Release the buffer, from another thread: no byte is written to it after this."""
        with self._ending:
            self._abandoned = True
            if self._end is not None:
                # Finished, closed, or (urllib3's RuntimeError) back in the pool already.
                with suppress(AttributeError, OSError, RuntimeError, ValueError):
                    self._end()
        with self._filling:
            pass  # the piece that was being written is complete now
