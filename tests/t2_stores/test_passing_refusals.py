"""A refusal that passes is borne like an outage; one that lasts is told at once; a proxy's 404 is neither."""

from __future__ import annotations

import pytest
from botocore.exceptions import CredentialRetrievalError, TokenRetrievalError
from stubs3 import ABSENT, EMPTY_404, HTML_404, XHTML_404, Answer, calls, xml_error

from stepfs.errors import ArchivedError, RefusedError, StoreUnreachableError
from stepfs.lake import slots
from stepfs.store.api import Put
from stepfs.store.s3.clients import Clients

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
    assert await slots.take_slot(stubbed, "x/log/1", b"x") == slots.Mine()
    stub.answer = lambda _method, _path: EXPIRED
    outcome = await slots.take_slot(stubbed, "x/log/2", b"x")
    assert isinstance(outcome, slots.Unknown)
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
