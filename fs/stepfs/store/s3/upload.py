"""Uploads without copies: a body chained from its parts, cut into multipart pieces, checksummed for the server.

The server verifies the CRC32C of each piece before it acknowledges the piece, so bytes damaged on the way, or a buffer
that changed under an abandoned upload, never become an object.
"""

from __future__ import annotations

import base64
import bisect
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import crc32c
import trio

from stepfs.store.s3.errors import FAILURES, read_error

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

T = TypeVar("T")

SINGLE_BYTES_MAX: Final = 96 << 20  # AWS advises several from 100 MB on; a 64 MiB batch and its index are one
_PIECE_BYTES_MIN: Final = 16 << 20
_PIECES_MAX: Final = 10_000  # S3's limit
_PIECES_AT_ONCE: Final = 4
_SEND_BYTES: Final = 1 << 20
_JOINED_BYTES_MAX: Final = 64 << 10  # copying a larger part would cost more than it saves
_ABORT_S: Final = 10.0


class AbandonedError(BaseException):
    """The caller abandoned the upload; the request must not complete. Not an Exception: botocore would retry it."""


class ChainedBody:
    """Seekable read-only file over buffers, for botocore: retries rewind it, nothing is joined."""

    def __init__(self, views: Sequence[memoryview], abandoned: threading.Event) -> None:
        self._views = views
        self._ends = list(itertools.accumulate(map(len, views)))
        self._length = self._ends[-1] if views else 0
        self._position = 0
        self._abandoned = abandoned

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """Up to 1 MiB, even if `size` is less: urllib3 passes 16 KiB, which is 4096 Python calls per 64 MiB.

        Small parts are joined: otherwise a step of thousands of slices would cost as many calls of `send`.
        """
        if self._abandoned.is_set():
            raise AbandonedError
        wanted = _SEND_BYTES if size >= 0 else self._length
        number = bisect.bisect_right(self._ends, self._position)
        parts: list[memoryview] = []
        while number < len(self._views) and wanted > 0:
            view = self._views[number]
            part = view[len(view) - (self._ends[number] - self._position) :][:wanted]
            if parts and len(part) > _JOINED_BYTES_MAX:
                break
            parts.append(part)
            self._position += len(part)
            wanted -= len(part)
            number += 1
            if len(part) > _JOINED_BYTES_MAX:
                break
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut a body into multipart pieces of equal size (the last may be smaller), without copying."""
    total = sum(len(view) for view in views)
    size = max(_PIECE_BYTES_MIN, -(-total // _PIECES_MAX))
    piece: list[memoryview] = []
    room = size
    for view in views:
        offset = 0
        while offset < len(view):
            part = view[offset : offset + room]
            piece.append(part)
            offset += len(part)
            room -= len(part)
            if room == 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def checksum(views: Sequence[memoryview], known: int | None = None) -> str:
    """CRC32C of the concatenation, in S3's notation."""
    value = known or 0
    for view in views if known is None else ():
        value = crc32c.crc32c(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def encryption() -> dict[str, str]:
    """The server-side encryption that the environment chooses, as request parameters."""
    chosen = {"ServerSideEncryption": "STEPFS_SSE", "SSEKMSKeyId": "STEPFS_SSE_KMS_KEY_ID"}
    return {name: value for name, variable in chosen.items() if (value := os.environ.get(variable))}


class Call(Protocol):
    """Runs blocking work in a worker thread, counted and limited by the store."""

    async def __call__(self, work: Callable[[], T], /, *, abandon: bool = True) -> T: ...


class Upload:
    """One object on its way up."""

    def __init__(self, bucket: str, name: str, views: Sequence[memoryview], encryption: dict[str, str]) -> None:
        self._target: dict[str, Any] = {"Bucket": bucket, "Key": name}
        self._views = views
        self._encryption: dict[str, Any] = dict(encryption)
        self.length = sum(len(view) for view in views)
        self.abandoned = threading.Event()  # once set, bodies raise at the next read

    def create(self, client: S3Client, body: bytes) -> None:
        client.put_object(
            **self._target,
            **self._encryption,
            Body=body,
            IfNoneMatch="*",
            ChecksumCRC32C=checksum(self._views),
        )

    def send(self, client: S3Client, crc32c: int | None) -> None:
        """Single PUT. `crc32c` None: not known yet."""
        client.put_object(
            **self._target,
            **self._encryption,
            Body=self._body(self._views),
            ChecksumCRC32C=checksum(self._views, crc32c),
        )

    async def send_pieces(self, client: Callable[[], S3Client], call: Call) -> None:
        """Multipart, a few pieces at once; after a failure it returns only when no piece is being sent any more."""
        upload_id = await call(lambda: self._begin(client()))
        done: dict[int, CompletedPartTypeDef] = {}
        slots = trio.CapacityLimiter(_PIECES_AT_ONCE)
        failed: list[Exception] = []

        async def send(number: int, piece: Sequence[memoryview]) -> None:
            async with slots:
                if self.abandoned.is_set():
                    return
                try:
                    done[number] = await call(
                        lambda: self._send_piece(client(), upload_id, number, piece), abandon=False
                    )
                except FAILURES as error:
                    failed.append(error)
                    self.abandoned.set()
                except AbandonedError:
                    return  # another piece failed, or the caller was cancelled

        async def stop_when_cancelled() -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.abandoned.set()  # without effect once all pieces have arrived

        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(stop_when_cancelled)
                async with trio.open_nursery() as nursery:
                    for number, piece in enumerate(pieces(self._views), start=1):
                        nursery.start_soon(send, number, piece)
                watching.cancel_scope.cancel()
            for error in failed[:1]:
                raise error  # noqa: TRY301 (out of the nurseries, which would wrap it)
            parts = [done[number] for number in sorted(done)]
            await call(lambda: self._complete(client(), upload_id, parts))
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _ABORT_S), suppress(*FAILURES):
                await call(lambda: client().abort_multipart_upload(**self._target, UploadId=upload_id))
            raise

    def _body(self, views: Sequence[memoryview]) -> IO[bytes]:
        return cast("IO[bytes]", ChainedBody(views, self.abandoned))  # it has the methods that botocore uses

    def _begin(self, client: S3Client) -> str:
        begun = client.create_multipart_upload(**self._target, **self._encryption, ChecksumAlgorithm="CRC32C")
        return begun["UploadId"]

    def _send_piece(
        self, client: S3Client, upload_id: str, number: int, piece: Sequence[memoryview]
    ) -> CompletedPartTypeDef:
        crc = checksum(piece)
        answer = client.upload_part(
            **self._target,
            UploadId=upload_id,
            PartNumber=number,
            Body=self._body(piece),
            ChecksumCRC32C=crc,
        )
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": crc}

    def _complete(self, client: S3Client, upload_id: str, parts: list[CompletedPartTypeDef]) -> None:
        try:
            client.complete_multipart_upload(**self._target, UploadId=upload_id, MultipartUpload={"Parts": parts})
        except FAILURES as error:
            # the retry of a completion that succeeded finds no upload any more, but the object
            if read_error(error).reason != "NoSuchUpload":
                raise
            if client.head_object(**self._target)["ContentLength"] != self.length:
                raise
