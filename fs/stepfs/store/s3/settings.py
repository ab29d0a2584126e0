"""The settings of S3 that users get wrong: names and advice, without boto3, for every room that speaks of them."""

from __future__ import annotations

from typing import Final

PREFIXES: Final = ("AWS_", "S3_")  # of environment variables
SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
CHECK_NETWORK: Final = "check the network and AWS_ENDPOINT_URL_S3, then retry"
CHECK_KEYS: Final = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
SET_KEYS: Final = "set AWS_ACCESS_KEY_ID or AWS_PROFILE instead"
