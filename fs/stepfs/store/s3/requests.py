"""Single requests through boto3, in a thread: a range into the caller's buffer, a whole object, a page of names, a batch of
deletes.

Bytes go from the socket through one cache-sized piece into the buffer (measured: as cheap as urllib3's own `readinto`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from stepfs.errors import RefusedError
from stepfs.store.ages import age_s, http_date
from stepfs.store.api import Entry
from stepfs.store.read_target import PIECE_BYTES, ReadTarget, whole_body

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef


class AnswerCount:
    """Counts the answers that began."""

    answers = 0


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


def download_whole(
    client: S3Client,
    bucket: str,
    key: str,
    bytes_max: int,
    answered: AnswerCount,
    sign_of_life: Callable[[], None],
) -> bytes:
    """The object's bytes, in one request; `CorruptError` before the read if the object is too large."""
    response = client.get_object(Bucket=bucket, Key=key)
    answered.answers += 1
    with closing(response["Body"]) as body:
        pieces = iter(partial(body.read, PIECE_BYTES), b"")
        what = f"s3://{bucket}/{key}"
        # A proxy that sends the body in chunks leaves the length out.
        return whole_body(pieces, response.get("ContentLength", 0), bytes_max, what, sign_of_life)


def page_entries(page: ListObjectsV2OutputTypeDef, prefix: str, *, ages: bool) -> list[Entry]:
    """The entries of one answer, keys without `prefix`. Without a readable Date every age is 0: unknown."""
    headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    now = http_date(headers.get("date")) if ages else None
    return [
        Entry(item["Key"].removeprefix(prefix), item["Size"], age_s(item.get("LastModified"), now))
        for item in page.get("Contents", [])
    ]


def delete_batch(client: S3Client, bucket: str, prefix: str, keys: Sequence[str]) -> dict[str, str]:
    """Delete at most 1,000 keys. Returns key → error code of those that are still there."""
    answer = client.delete_objects(
        Bucket=bucket,
        Delete={"Objects": [{"Key": prefix + key} for key in keys], "Quiet": True},
    )
    failed = {error.get("Key", ""): error.get("Code", "") for error in answer.get("Errors", [])}
    return {name.removeprefix(prefix): code for name, code in failed.items() if code != "NoSuchKey"}
