"""A ranged GET into a buffer whose owner may abandon it at any moment.

Bytes go from the socket through one cache-sized piece into the caller's buffer (measured: as cheap as urllib3's own
`readinto`), where the caller may checksum them while they are still in the CPU's cache. The copy holds a lock that
`abandon` takes: once `abandon` has returned, no byte is written to the buffer any more, and the connection is shut
down so that the thread ends at once instead of at its timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

from stepfs.errors import CorruptError, RefusedError
from stepfs.store.api import Progress

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PIECE_BYTES: Final = 1 << 20


class AbandonedReadError(Exception):
    """The owner has abandoned the buffer; no caller sees this error."""


class AnswerCount:
    """Counts the answers that began; calls `on_sign_of_life` for each piece."""

    def __init__(self, on_sign_of_life: Callable[[], None]) -> None:
        self.on_sign_of_life = on_sign_of_life
        self.answers = 0


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


def download(client: S3Client, bucket: str, key: str, offset: int, target: ReadTarget) -> None:
    """Fill the rest of the buffer with the object's bytes from `offset` + `target.done`; one request."""
    first = offset + target.done
    last = offset + target.done + target.remaining - 1
    response = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{last}")
    target.answers += 1
    body = response["Body"]
    with closing(body):
        if not response.get("ContentRange", "").startswith(f"bytes {first}-"):
            raise RefusedError(f"s3://{bucket}/{key}: the server ignores Range requests; use another server")
        target.connect(getattr(body, "_raw_stream", None))  # the only way to end a blocked read
        while piece := body.read(_PIECE_BYTES):
            target.append(piece)


def download_whole(client: S3Client, bucket: str, key: str, bytes_max: int, answered: AnswerCount) -> bytes:
    """The object's bytes, in one request; `CorruptError` before the read if the object is too large."""
    response = client.get_object(Bucket=bucket, Key=key)
    answered.answers += 1
    with closing(response["Body"]) as body:
        size = response["ContentLength"]
        if size > bytes_max:
            raise CorruptError(f"s3://{bucket}/{key} has {size} bytes, at most {bytes_max} make sense")
        pieces = []
        while piece := body.read(_PIECE_BYTES):
            pieces.append(piece)
            answered.on_sign_of_life()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
