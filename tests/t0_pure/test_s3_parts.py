"""What the S3 store is made of, without a server: what errors mean, bodies of many parts, reads that are left."""

from __future__ import annotations

import threading

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import StoreUnreachableError
from stepfs.store.api import Put, byte_views
from stepfs.store.s3.errors import read_error
from stepfs.store.s3.upload import ChainedBody
from stepfs.store.server_answers import AbandonedReadError, ReadTarget, create_outcome, explain
from stepfs.store.settings import S3


@pytest.mark.parametrize("code", ["ThrottlingException", "RequestLimitExceeded", "IncompleteBody"])
def test_throttling_is_later_whatever_its_status(code):
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    error = ClientError(answer, "PutObject")
    assert create_outcome(read_error(error)) is Put.UNKNOWN
    assert isinstance(explain(read_error(error), "s3://b", "create log/1", S3), StoreUnreachableError)


@given(st.lists(st.integers(0, 3000), max_size=60), st.data())
def test_a_body_of_parts_reads_as_one(sizes, data):
    parts = [memoryview(bytes([number % 251]) * size) for number, size in enumerate(sizes)]
    whole = b"".join(parts)
    body = ChainedBody(byte_views(parts), threading.Event())
    start = data.draw(st.integers(0, len(whole)))
    assert body.seek(start) == start
    read = b""
    while piece := body.read(data.draw(st.integers(1, 5000))):
        read += piece
    assert read == whole[start:]
    body.seek(0)
    assert b"".join(iter(body.read, b"")) == whole


def test_thousands_of_slices_are_few_sends():
    views = byte_views([bytes(64)] * 32_768 + [bytes(8 << 20)])
    body = ChainedBody(views, threading.Event())
    sends = 0
    while body.read(16 << 10):
        sends += 1
    assert sends == 2 + 8  # the small ones joined to 1 MiB each; the large one uncopied


def test_a_read_that_is_left_just_as_it_ended_raises_nothing():
    def shutdown():
        raise RuntimeError("Cannot shutdown as connection has already been released to the pool")

    target = ReadTarget(memoryview(bytearray(8)), lambda _: None)
    with pytest.raises(AbandonedReadError), target.connected(shutdown):
        target.abandon()
