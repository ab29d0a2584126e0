"""Stores that read from a raw server, with and beside botocore."""

from __future__ import annotations

from rawserver import BODY, RawServer, well

from stepfs.errors import StepfsError
from stepfs.store.s3.s3_store import S3Store

KEY = "data/p=1/x"
SIZE = (2 << 20) + 1000
FIRST = 12345


async def read(
    store: S3Store, first: int = FIRST, size: int = SIZE
) -> tuple[int | None, bytes] | tuple[type[StepfsError], str]:
    """The result for a caller: the bytes, or the class and the line of the error."""
    buffer = bytearray(size)
    try:
        got = await store.read_into(KEY, first, memoryview(buffer))
    except StepfsError as error:
        return type(error), str(error)
    return got, bytes(buffer[:got])


async def learn(server: RawServer, store: S3Store) -> None:
    """Read once, so that the next read is direct."""
    answer, server.answer = server.answer, well
    assert await read(store, 0, 10) == (10, BODY[:10])
    server.answer = answer


def asks_directly(store: S3Store) -> bool:
    return store._clients.direct()._place is not None


def was_direct(head: bytes) -> bool:
    """Whether a request came without botocore: that one numbers its attempts."""
    return b"amz-sdk-request" not in head
