"""The buffer of a read, whose owner may abandon it at any moment.

Bytes land under a lock that `abandon` takes, and the owner may checksum them while they are still in the CPU's cache.
Once `abandon` has returned, no byte is written to the buffer any more, and the connection is shut down so that the
thread ends at once instead of at its timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stepfs.store.api import Progress


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
        self._lock = threading.Lock()
        self._abandoned = False
        self._stream: Any = None
        self.done = 0
        self.answers = 0  # responses that began

    @property
    def remaining(self) -> int:
        return len(self._buffer) - self.done

    def connect(self, stream: Any) -> None:
        """Remember the raw stream, for `abandon` to shut down."""
        with self._lock:
            self._stream = stream
            if self._abandoned:
                raise AbandonedReadError

    def append(self, piece: bytes) -> None:
        with self._lock:
            if self._abandoned:
                raise AbandonedReadError
            self._buffer[self.done : self.done + len(piece)] = piece
            self.done += len(piece)
            self._landed(self.done)
        self._sign_of_life()

    def abandon(self) -> None:
        """Release the buffer, from another thread: no byte is written to it after this."""
        with self._lock:
            self._abandoned = True
            if self._stream is not None:
                # Finished, closed, or (urllib3's RuntimeError) back in the pool already.
                with suppress(AttributeError, OSError, RuntimeError, ValueError):
                    self._stream.shutdown()
