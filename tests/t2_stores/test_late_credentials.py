"""Credentials of a role that come late, or rarely: an outage, and nothing to be remembered. IMDS is played here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
from stubs3 import ABSENT, Answer, StubS3, stub_s3, xml_error

from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs.store.s3 import clients
from stepfs.store.s3.s3_store import S3Store

ROLE = "/latest/meta-data/iam/security-credentials/"


class Imds:
    """An instance metadata service whose credentials come after a number of looks."""

    def __init__(self, stub: StubS3) -> None:
        self.stub = stub
        self.late = 0  # requests for the role's name that find none yet
        self.given = 0
        stub.answer = self._answer

    def _answer(self, method: str, path: str) -> Answer:
        if method == "PUT":
            return Answer(body=b"token")
        if path == ROLE:
            self.late -= 1
            return Answer(503) if self.late >= 0 else Answer(body=b"trainer")
        self.given += 1
        until = (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
        named = {"AccessKeyId": f"role-{self.given}", "SecretAccessKey": "secret", "Token": "t", "Expiration": until}
        return Answer(body=json.dumps({"Code": "Success", **named}).encode())


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Imds]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setattr(clients, "_held", {})
    with stub_s3() as stub:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint_url)
        yield Imds(stub)


@pytest.fixture
def bucket() -> Iterator[StubS3]:
    with stub_s3() as stub:
        yield stub


async def test_a_store_opened_before_the_role_has_credentials_gets_them(imds: Imds, bucket: StubS3) -> None:
    imds.late = 2 * clients._TRIES
    store = S3Store("bucket", "run", endpoint_url=bucket.endpoint_url)
    for _ in range(2):
        with pytest.raises(StoreUnreachableError, match=r"has no credentials yet .*; retry, or attach a role"):
            await store.get("a")
    assert bucket.requests == []
    assert await store.get("a") is None
    assert imds.given == 1
    await store.aclose()


async def test_a_try_of_its_own_is_made_of_several(imds: Imds, bucket: StubS3) -> None:
    """A service that limits its rate refuses one request and answers the next."""
    imds.late = clients._TRIES - 1
    store = S3Store("bucket", "run", endpoint_url=bucket.endpoint_url)
    assert await store.get("a") is None
    await store.aclose()


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "ExpiredToken"])
async def test_a_clock_that_is_not_set_yet_is_waited_for_where_a_role_answers(imds, bucket, monkeypatch, code) -> None:
    bucket.answer = lambda _method, _path: xml_error(403, code)
    store = S3Store("bucket", "run", endpoint_url=bucket.endpoint_url)
    with pytest.raises(StoreUnreachableError, match=rf"{code}.*; retry, or"):
        await store.get("a")
    bucket.answer = lambda _method, _path: ABSENT
    assert await store.get("a") is None
    await store.aclose()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a person's")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    bucket.answer = lambda _method, _path: xml_error(403, code)
    store = S3Store("bucket", "run", endpoint_url=bucket.endpoint_url)
    with pytest.raises(RefusedError, match=code):
        await store.get("a")
    await store.aclose()


async def test_where_no_role_is_expected_missing_credentials_are_a_mistake(imds, bucket, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = S3Store("bucket", "run", endpoint_url=bucket.endpoint_url)
    with pytest.raises(RefusedError, match="Unable to locate credentials"):
        await store.get("a")
    await store.aclose()
    vendor = tmp_path / "sys_vendor"
    monkeypatch.setattr(clients, "_VENDOR", vendor)
    assert not clients.are_expected()
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    assert not clients.are_expected()
    vendor.write_text("Amazon EC2\n")
    assert clients.are_expected()


def get_in_child(bucket: StubS3) -> int:
    """The exit code of a forked process that reads with a store of its own."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async def read() -> None:
        await S3Store("bucket", "run", endpoint_url=bucket.endpoint_url).get("a")

    code = 99
    try:
        trio.run(read)
        code = 0
    except StepfsError as error:
        code = error.exit_code
    finally:
        os._exit(code)


def test_forked_workers_begin_with_the_parents_credentials(imds: Imds, bucket: StubS3) -> None:
    async def read() -> None:
        store = S3Store("bucket", "run", endpoint_url=bucket.endpoint_url)
        await store.get("a")
        await store.aclose()

    trio.run(read)
    imds.late = 1_000_000  # from here on it refuses everybody
    asked = len(imds.stub.requests)
    assert [get_in_child(bucket) for _ in range(4)] == [0] * 4
    assert len(imds.stub.requests) == asked
    assert len(bucket.authorizations) >= 1
    assert all("Credential=role-1/" in (one or "") for one in bucket.authorizations)


def test_copied_credentials_are_renewed_by_a_session_of_their_own(imds: Imds) -> None:
    from stepfs.store.s3.clients import choose  # noqa: PLC0415

    def session():
        return choose(None, None).session

    first = clients.credentials_of(session(), session)
    copy: Any = clients._copied(first, session)
    assert copy.get_frozen_credentials() == first.get_frozen_credentials()
    copy._expiry_time = datetime.now(UTC) + timedelta(seconds=30)
    assert copy.get_frozen_credentials().access_key == "role-2"
    copy._expiry_time = datetime.now(UTC) + timedelta(seconds=30)
    imds.late = 1_000
    with pytest.raises(Exception, match="there are none just now"):
        copy.get_frozen_credentials()
