"""GETs through boto3: a range into the caller's buffer, or a whole object.

Bytes go from the socket through one cache-sized piece into the buffer (measured: as cheap as urllib3's own `readinto`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from stepfs.errors import CorruptError, RefusedError
from stepfs.store.read_target import PIECE_BYTES, ReadTarget

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


class AnswerCount:
    """Counts the answers that began; calls `on_sign_of_life` for each piece."""

    def __init__(self, on_sign_of_life: Callable[[], None]) -> None:
        self.on_sign_of_life = on_sign_of_life
        self.answers = 0


def download(client: S3Client, bucket: str, key: str, offset: int, target: ReadTarget) -> None:
    """Fill the rest of the buffer with the object's bytes from `offset` + `target.done`; one request."""
    first = offset + target.done
    last = offset + target.done + target.remaining - 1
    response = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{last}")
    target.answers += 1
    body: Any = response["Body"]
    with closing(body), target.connected(body._raw_stream.shutdown):  # noqa: SLF001 - the only way to end a blocked read
        if not response.get("ContentRange", "").startswith(f"bytes {first}-"):
            raise RefusedError(f"s3://{bucket}/{key}: the server ignores Range requests; use another server")
        while piece := body.read(PIECE_BYTES):
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
        while piece := body.read(PIECE_BYTES):
            pieces.append(piece)
            answered.on_sign_of_life()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
