"""Objects in a bucket as files of a corpus. boto3 takes 0.3 s to import, so only sources on S3 pay for it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from stepfs.errors import UsageError

if TYPE_CHECKING:
    from stepfs.store.s3.read_only import ReadOnlyBucket


def split_url(url: str) -> tuple[str, str]:
    """Bucket and key of s3://bucket/key. The key is taken as it stands: '+', '%' and spaces mean themselves."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if "@" in bucket:
        raise UsageError("credentials do not belong into a URL; set AWS_ACCESS_KEY_ID, or name a `profile`")
    if not bucket:
        raise UsageError(f"{url!r} names no bucket; write s3://bucket/prefix/")
    return bucket, key


@lru_cache(maxsize=64)
def bucket_of(bucket: str, endpoint_url: str | None, profile: str | None) -> ReadOnlyBucket:
    """The bucket's reader; one per process, because its connections are worth keeping."""
    from stepfs.store.s3.read_only import ReadOnlyBucket  # noqa: PLC0415

    return ReadOnlyBucket(bucket, endpoint_url=endpoint_url, profile=profile)
