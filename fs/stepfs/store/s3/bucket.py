"""Requests to a bucket as a whole: one DELETE of many objects, and whether it keeps versions. They run in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def delete_batch(client: S3Client, bucket: str, prefix: str, keys: Sequence[str]) -> dict[str, str]:
    """Delete at most 1,000 keys. Returns key → error code of those that are still there."""
    answer = client.delete_objects(
        Bucket=bucket,
        Delete={"Objects": [{"Key": prefix + key} for key in keys], "Quiet": True},
    )
    failed = {error.get("Key", ""): error.get("Code", "") for error in answer.get("Errors", [])}
    return {name.removeprefix(prefix): code for name, code in failed.items() if code != "NoSuchKey"}


def is_versioned(client: S3Client, bucket: str) -> bool:
    """Whether the bucket keeps new versions. False when suspended: later writes replace each other."""
    return client.get_bucket_versioning(Bucket=bucket).get("Status") == "Enabled"
