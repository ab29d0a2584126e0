"""Which credentials S3 is asked with: those of a profile, or of a role; and refusals that pass, or that last."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import servers
import trio
from botocore.exceptions import CredentialRetrievalError, TokenRetrievalError
from botocore.loaders import JSONFileLoader
from stubs3 import ABSENT, EMPTY_404, HTML_404, XHTML_404, Answer, StubS3, calls, stub_s3, xml_error

from stepfs.doctor.lakes import check_lake
from stepfs.errors import ArchivedError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.lake import create_once
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Put, StoreOptions
from stepfs.store.opening import open_store
from stepfs.store.s3 import clients
from stepfs.store.s3.clients import Clients, choose, profile_of
from stepfs.store.s3.s3_store import S3Store


def test_keys_in_a_file_are_taken_anew_as_the_manual_has_it(monkeypatch, tmp_path):
    page = (Path(__file__).parents[2] / "fs/OPERATIONS.md").read_text()
    lines = re.search(r"^/keys/config +(.*)\n +(.*)\n/keys/current.json +(.*)$", page, re.MULTILINE).groups()
    *config, keys = (line.replace("/keys", str(tmp_path)) for line in lines)
    (tmp_path / "config").write_text("\n".join(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def renew(key):
        soon = datetime.now(UTC) + timedelta(minutes=14)
        (tmp_path / "current.json").write_text(
            json.dumps(json.loads(keys) | {"AccessKeyId": key, "Expiration": f"{soon}"})
        )

    renew("first")
    found = clients.credentials_of(choose(None, None).session, lambda: choose(None, None).session)
    assert found.get_frozen_credentials().access_key == "first"
    renew("second")
    assert found.get_frozen_credentials().access_key == "second", "a quarter of an hour before the first expires"


@pytest.mark.parametrize(
    ("url", "name"), [
        ("s3://train", "s3://train"), ("s3://train/c", "s3://train"), ("s3://train/a/b", "s3://train/a"),
        ("s3://train/ab", "s3://train"), ("s3://training/a", None), ("s3://other/dir", "s3://other/"),
        ("s3://default", None),
    ],
)  # fmt: skip
def test_the_longest_name_that_begins_the_url_at_a_slash_is_meant(url, name):
    assert profile_of(url, ["default", "s3", "s3://train", "s3://train/a", "s3://other/"]) == name


@pytest.fixture
def second():
    """A server that the environment says nothing of."""
    with stub_s3() as server:
        yield server


@pytest.fixture
def configured(monkeypatch, tmp_path, second):
    def write(*lines, name="s3://stepfs-tests/eu"):
        path = tmp_path / "config"
        path.write_text("\n".join([f"[profile {name}]", *lines, ""]))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(path))

    write(f"endpoint_url = {second.endpoint_url}", "aws_access_key_id = eu", "aws_secret_access_key = x")
    return write


def open_s3(url):
    opened = open_store(url)
    assert isinstance(opened, S3Store)
    return opened


async def test_below_its_name_a_profile_says_all_and_elsewhere_nothing(seaweed, s3_url, configured, second):
    here, there = open_s3(s3_url), open_s3("s3://stepfs-tests/eu/run")
    await here.put("a", [b"here"])
    assert await there.get("a") is None
    assert await here.get("a") == b"here"
    assert [path for _, path in second.requests] == ["/stepfs-tests/eu/run/a"]
    assert (here.profile, there.profile) == (None, "s3://stepfs-tests/eu")
    for store in (here, there):
        await store.aclose()


async def test_its_services_section_counts_too(seaweed, configured, second):
    configured(
        "services = eu\naws_access_key_id = eu\naws_secret_access_key = x",
        "[services eu]",
        f"s3 =\n  endpoint_url = {second.endpoint_url}",
    )
    store = open_store("s3://stepfs-tests/eu/run")
    assert await store.get("a") is None
    assert len(second.requests) == 1
    await store.aclose()


async def test_an_endpoint_of_the_environment_is_none_of_a_profiles(seaweed, configured):
    """Without one of its own it means Amazon's."""
    configured("region = eu-west-1", "aws_access_key_id = eu", "aws_secret_access_key = x")
    store = open_s3("s3://stepfs-tests/eu/run")
    client = store._clients.data()
    assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    await store.aclose()


@pytest.mark.parametrize(("of_origin", "asked"), [(False, True), (True, False)])
async def test_an_endpoint_of_the_command_line_means_its_lake(seaweed, configured, second, of_origin, asked):
    with stub_s3() as given:
        options = StoreOptions(given.endpoint_url)
        store = open_store("s3://stepfs-tests/eu/run", options=options.for_origin() if of_origin else options)
        assert await store.get("a") is None
        assert bool(given.requests) is asked
        assert bool(second.requests) is not asked
        await store.aclose()


async def test_an_origin_without_a_profile_lies_at_the_endpoint_given(seaweed, configured):
    with stub_s3() as given:
        store = open_store("s3://stepfs-tests/x", options=StoreOptions(given.endpoint_url).for_origin())
        assert await store.get("a") is None
        assert given.requests
        await store.aclose()


async def test_a_profile_without_keys_has_none_of_the_environments(seaweed, configured, second, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    configured(f"endpoint_url = {second.endpoint_url}")
    store = open_store("s3://stepfs-tests/eu/run")
    with pytest.raises(
        RefusedError, match=r"Unable to locate credentials.*keys of .*\[s3://stepfs-tests/eu\]"
    ) as refused:
        await store.get("a")
    assert "AWS_ACCESS_KEY_ID" not in str(refused.value)  # it is set, and does not count
    assert second.requests == []
    await store.aclose()


async def test_doctor_names_the_profile_without_its_secrets(seaweed, configured, second):
    second.answer = lambda method, _path: ABSENT if method == "GET" else xml_error(403, "AccessDenied")
    store = open_store("s3://stepfs-tests/eu/run")
    findings = [finding async for finding in check_lake(store, OriginStores(store, pytest.fail))]
    (named,) = [finding for finding in findings if finding.subject == "profile"]
    assert named.detail == "[profile s3://stepfs-tests/eu] of the AWS configuration, by the lake's URL"
    assert not any("eu-secret" in finding.detail for finding in findings)
    await store.aclose()


def test_botocore_reads_such_names(configured):
    """In one of its files; if it ever stops, this says so."""
    assert os.environ["AWS_CONFIG_FILE"]
    assert "s3://stepfs-tests/eu" in boto3.session.Session().available_profiles
    assert servers.BUCKET == "stepfs-tests"


def test_a_second_session_parses_no_model_of_botocore_again(monkeypatch):
    """Each of a DataLoader's workers, forked from a process that had opened the lake, parsed them for its first read."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    choose(None, "s3://train/run").session.client("s3")
    parsed = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _self, path: parsed.append(path))
    choose(None, "s3://train/run").session.client("s3")
    assert parsed == []


async def test_all_clients_of_a_store_share_what_one_session_has_read(seaweed, s3_url, monkeypatch):
    """Files and rules take 7 ms for each session."""
    made = []
    monkeypatch.setattr(clients, "choose", lambda *asked: made.append(choose(*asked)) or made[-1])
    store = open_s3(s3_url)
    assert await store.get("a") is None
    assert await store.create("a", b"1") is Put.CREATED
    await store.delete(["a"])
    assert len(made) == 1
    await store.aclose()
    assert await store.get("a") is None  # later, settings are read again
    assert len(made) == 2
    await store.aclose()


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
    imds.late = clients._TRIES - 1  # as patient as the parent
    assert copy.get_frozen_credentials().access_key == "role-3"
    copy._expiry_time = datetime.now(UTC) + timedelta(seconds=30)
    imds.late = 1_000
    with pytest.raises(Exception, match="there are none just now"):
        copy.get_frozen_credentials()


FORBIDDEN = xml_error(403, "AccessDenied")
EXPIRED = xml_error(400, "ExpiredToken")


def well(method, path):
    if method == "GET" and "list-type" in path:
        return Answer(body=b"<ListBucketResult></ListBucketResult>")
    if method == "POST":
        return Answer(body=b"<DeleteResult></DeleteResult>")
    return ABSENT if method == "GET" else Answer(headers={"ETag": '"x"'})


@pytest.mark.parametrize("refusal", [FORBIDDEN, EXPIRED], ids=["403", "expired token"])
@pytest.mark.parametrize("verb", ["get", "read", "create", "put", "list", "delete"])
async def test_what_was_allowed_before_is_unreachable_and_what_was_not_is_refused(stubbed, stub, verb, refusal):
    call = calls(stubbed)[verb]
    stub.answer = lambda _method, _path: refusal
    with pytest.raises(RefusedError, match="the server refuses these credentials"):
        await call()
    stub.answer = well
    await call()
    stub.answer = lambda _method, _path: refusal
    with pytest.raises(StoreUnreachableError, match=r"(AccessDenied|ExpiredToken).*it was allowed before"):
        await call()
    stub.answer = well
    await call()


@pytest.mark.parametrize("verb", ["create", "put", "list", "delete"])
async def test_a_right_elsewhere_or_to_do_something_else_proves_nothing(stubbed, stub, verb):
    stub.answer = well
    await stubbed.get("x/log/1")
    await calls(stubbed, "x/data/p/1")[verb]()
    stub.answer = lambda _method, _path: FORBIDDEN
    with pytest.raises(RefusedError):
        await calls(stubbed)[verb]()
    stub.answer = lambda _method, _path: EXPIRED  # denies everything alike
    with pytest.raises(StoreUnreachableError, match="ExpiredToken"):
        await calls(stubbed)[verb]()


@pytest.mark.parametrize(
    "error",
    [
        CredentialRetrievalError(provider="web-identity", error_msg="no token"),
        TokenRetrievalError(provider="sso", error_msg="expired"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_credentials_that_cannot_be_renewed_just_now_are_waited_for(stubbed, stub, monkeypatch, error):
    def fail(*_arguments):
        raise error

    sound = Clients.data, Clients.commit
    for proven in (False, True):
        monkeypatch.setattr(Clients, "data", fail)
        monkeypatch.setattr(Clients, "commit", fail)
        with pytest.raises(StoreUnreachableError if proven else RefusedError, match=r"(no token|expired)"):
            await stubbed.get("x/log/1")
        with pytest.raises(StoreUnreachableError if proven else RefusedError):
            await stubbed.create("x/log/1", b"x")
        monkeypatch.setattr(Clients, "data", sound[0])
        monkeypatch.setattr(Clients, "commit", sound[1])
        await stubbed.get("x/log/1")


async def test_a_slot_that_was_refused_for_a_moment_is_undecided_not_given_up(stubbed, stub):
    stub.answer = well
    assert await create_once.take_slot(stubbed, "x/log/1", b"x") == create_once.Mine()
    stub.answer = lambda _method, _path: EXPIRED
    outcome = await create_once.take_slot(stubbed, "x/log/2", b"x")
    assert isinstance(outcome, create_once.Unknown)
    assert "ExpiredToken" in outcome.why


@pytest.mark.parametrize("page", [HTML_404, XHTML_404, EMPTY_404], ids=["html", "xhtml", "empty"])
async def test_a_404_that_is_not_the_stores_is_not_absence(stubbed, stub, page):
    stub.answer = lambda _method, _path: page
    for verb, call in calls(stubbed).items():
        with pytest.raises(StoreUnreachableError, match="not the store's; look for a proxy"):
            await call()
        assert verb


@pytest.mark.parametrize(
    "answer", [
        ABSENT, xml_error(404, "NotFound"),
        Answer(404, headers={"x-amz-request-id": "1"}),
    ], ids=["NoSuchKey", "NotFound", "request id"],
)  # fmt: skip
async def test_what_a_server_says_of_an_absent_key_is_absence(stubbed, stub, answer):
    stub.answer = lambda _method, _path: answer
    assert await stubbed.get("x/log/1") is None
    assert await stubbed.read_into("x/log/1", 0, memoryview(bytearray(1))) is None


@pytest.mark.parametrize(
    ("code", "outcome"), [
        ("ConditionalRequestConflict", Put.RETRY), ("OperationAborted", Put.RETRY), ("FileAlreadyExists", Put.EXISTS),
        ("ObjectAlreadyExists", Put.EXISTS),
    ],
)  # fmt: skip
async def test_a_409_that_means_taken_is_told_from_one_that_means_retry(stubbed, stub, code, outcome):
    stub.answer = lambda _method, _path: xml_error(409, code)
    assert await stubbed.create("x/log/1", b"x") is outcome


async def test_an_archived_object_is_no_matter_of_credentials(stubbed, stub):
    stub.answer = well
    await stubbed.get("x/data/1")
    stub.answer = lambda _method, _path: xml_error(403, "InvalidObjectState")
    for verb in ("get", "read"):
        with pytest.raises(ArchivedError, match=r"archived \(InvalidObjectState\); restore it with the store's own"):
            await calls(stubbed, "x/data/1")[verb]()
