"""A Ray that cannot be used is said in one line with the right exit code."""

from __future__ import annotations

import os
import socket

import pytest

from stepfs.errors import StepfsError, UsageError
from stepfs_producer.engine.reach import quiet, refusal_of, refuse_unreachable

# As Ray 2.60 raises them.
VERSION = RuntimeError(
    "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    "This process on node 10.0.0.5 was started with:\n    Ray: 2.55.0\n    Python: 3.11.7\n"
)
NO_TOKEN = RuntimeError(
    "Token authentication is enabled but no authentication token was found. Ensure that the token …"
)
WRONG_TOKEN = ConnectionError("Failed to connect to Ray cluster at 10.0.0.4:6379")
WRONG_TOKEN.__cause__ = RuntimeError(
    "Failed to connect to GCS. Last connection error: Traceback (most recent call last):\n"
    "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing or incorrect."
)
TOO_LARGE = ValueError("Package size (600.00MiB) exceeds the maximum size of 512.00MiB. To exclude large files, …")
NO_NODE = ConnectionError("Failed to connect to Ray cluster at 10.0.0.4:6379")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            VERSION,
            4,
            "Ray at 10.0.0.4:6379 is of another version: The cluster was started with: Ray: 2.60.0 Python: 3.11.7 This process",
        ),
        (NO_TOKEN, 4, "RAY_AUTH_TOKEN"),
        (WRONG_TOKEN, 4, "RAY_AUTH_TOKEN"),
        (NO_NODE, 6, "ray start --address=10.0.0.4:6379"),
        (TOO_LARGE, 4, "a directory of their own"),
    ],
)
def test_a_cluster_that_does_not_take_us_is_told_in_one_line(error: Exception, code: int, words: str) -> None:
    refused = refusal_of(error, "10.0.0.4:6379")
    assert (refused.exit_code, "\n" in str(refused)) == (code, False)
    assert words in str(refused)


@pytest.mark.parametrize("address", ["ray://10.0.0.4:10001", "10.0.0.4", ":6379", "10.0.0.4:"])
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="write auto, or HOST:PORT"):
        await refuse_unreachable(address)


async def test_where_nobody_listens_is_told_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(StepfsError, match="cannot be reached") as caught:
            await refuse_unreachable(f"127.0.0.1:{bound.getsockname()[1]}")
    assert caught.value.exit_code == 6


def test_ray_says_nothing_beside_us(capfd) -> None:
    with quiet():
        os.write(2, b"[2026-11-24] W rpc_client.h:153: Failed to connect")
    os.write(2, b"and we do")
    assert capfd.readouterr().err == "and we do"
