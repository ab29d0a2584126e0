"""What Google and Azure may answer, as obstore words it: each row of the table against a scripted server."""

from __future__ import annotations

import pytest
from stubs3 import EMPTY_404, HTML_404, Answer, calls, stub_s3, xml_error

from stepfs.errors import AbsentError, ArchivedError, RefusedError, StoreUnreachableError
from stepfs.lake import create_once
from stepfs.store.api import Put
from stepfs.store.opening import open_store

URLS = {"gs": "gs://bucket/lake", "az": "az://account/container/lake"}
NOT_MODIFIED = Answer(304)
LOGIN_PAGE = Answer(200, b"<html><body>log in</body></html>", {"Content-Type": "text/html"})
STORED = {"ETag": '"0x8DE2B"', "x-goog-generation": "1764000000000000"}  # as each says that it wrote
BAD_GATEWAY = Answer(502, b"<html><body>no status code: 409 Conflict</body></html>")


@pytest.fixture(params=["gs", "az"])
def scheme(request):
    return request.param


@pytest.fixture
def stub(monkeypatch, scheme):
    monkeypatch.setattr("stepfs._internal.entropy.uniform", lambda low, _: low)
    with stub_s3() as server:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.endpoint_url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "secret-token")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.endpoint_url}/account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0LWtleQ==")
        yield server


@pytest.fixture
async def store(stub, scheme):
    opened = open_store(URLS[scheme])
    yield opened
    await opened.aclose()


OUTCOMES = [
    (Answer(200, headers=STORED), Put.CREATED),
    (Answer(201, headers=STORED), Put.CREATED),
    (xml_error(412, "PreconditionFailed"), Put.EXISTS),
    (xml_error(412, "ConditionNotMet"), Put.EXISTS),
    (NOT_MODIFIED, Put.EXISTS),
    (xml_error(409, "BlobAlreadyExists"), Put.EXISTS),
    (xml_error(409, "BlobImmutableDueToPolicy"), Put.EXISTS),
    (xml_error(403, "UnauthorizedBlobOverwrite"), Put.EXISTS),  # to credentials that may create alone
    (xml_error(409, "ConditionalRequestConflict"), Put.RETRY),
    (Answer(409), Put.RETRY),
    (xml_error(429, "TooManyRequests"), Put.UNKNOWN),
    (xml_error(408, "RequestTimeout"), Put.UNKNOWN),
    (xml_error(400, "SlowDown"), Put.UNKNOWN),
    (xml_error(500, "InternalError"), Put.UNKNOWN),
    (xml_error(500, "OperationTimedOut"), Put.UNKNOWN),
    (xml_error(503, "ServerBusy"), Put.UNKNOWN),
    (xml_error(504, "GatewayTimeout"), Put.UNKNOWN),
    (BAD_GATEWAY, Put.UNKNOWN),
    (Answer(520), Put.UNKNOWN),  # of a proxy; no HTTPStatus
    (Answer(598), Put.UNKNOWN),
    (LOGIN_PAGE, Put.UNKNOWN),  # a text that says no status: maybe created, never surely
    (Answer(200, LOGIN_PAGE.body, {"ETag": '"5f3-612"'}), Put.UNKNOWN),
]


@pytest.mark.parametrize(("answer", "outcome"), OUTCOMES, ids=lambda row: str(row)[:60])
async def test_an_answer_to_a_create_has_one_outcome_and_is_asked_for_once(store, stub, answer, outcome):
    stub.answer = lambda _method, _path: answer
    assert await store.create("x/log/1", b"x") is outcome
    assert len(stub.requests) == store.counts.create == 1
    assert store.counts.throttled == (answer.status in {429, 503} or b"SlowDown" in answer.body)


@pytest.mark.parametrize(
    ("answer", "error", "line"),
    [
        (xml_error(501, "NotImplemented"), RefusedError, r"refuses the request \(501 NotImplemented\)"),
        (xml_error(400, "InvalidArgument"), RefusedError, r"refuses the request \(400 InvalidArgument\)"),
        (xml_error(413, "RequestBodyTooLarge"), RefusedError, "413 RequestBodyTooLarge"),
        (xml_error(403, "AccessDenied"), RefusedError, r"refuses these credentials or this action \(403"),
        (xml_error(401, "AuthenticationRequired"), RefusedError, r"refuses these credentials .*\(401"),
        (xml_error(404, "NoSuchBucket"), AbsentError, "does not exist .*create it first"),
        (xml_error(404, "ContainerNotFound"), AbsentError, "does not exist .*create it first"),
        (HTML_404, StoreUnreachableError, r"the answer \(404\) is not the store's; look for a proxy"),
        (EMPTY_404, StoreUnreachableError, r"the answer \(404\) is not the store's; look for a proxy"),
    ],
    ids=lambda row: str(row)[:60],
)
@pytest.mark.parametrize("verb", ["create", "get", "read", "put", "list"])
async def test_what_is_refused_says_by_whom_and_what_to_do(store, stub, verb, answer, error, line):
    stub.answer = lambda _method, _path: answer
    with pytest.raises(error, match=line) as refused:
        await calls(store)[verb]()
    looked = answer.status == 403 and verb in {
        "create",
        "put",
    }  # maybe the object is there, and only that is refused
    assert len(stub.requests) == 1 + looked
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "answer", [BAD_GATEWAY, Answer(520), xml_error(500, "InternalError"), xml_error(503, "SlowDown")]
)
@pytest.mark.parametrize("verb", ["get", "read", "put", "list", "delete"])
async def test_what_passes_is_asked_for_four_times_and_each_is_counted(store, stub, verb, answer):
    stub.answer = lambda _method, _path: answer
    with pytest.raises(StoreUnreachableError, match=f"{answer.status}.*check the .*network"):
        await calls(store)[verb]()
    assert len(stub.requests) == store.counts.requests == 4
    assert store.counts.throttled == (4 if answer.status == 503 else 0)


async def test_a_conflict_on_anything_but_a_create_passes_or_is_refused(store, stub):
    stub.answer = lambda _method, _path: xml_error(409, "OperationAborted")
    with pytest.raises(RefusedError, match=r"refuses the request \(409 OperationAborted\)"):
        await store.get("a")
    assert len(stub.requests) == 4


@pytest.mark.parametrize("verb", ["get", "read"])
async def test_a_login_page_is_no_object_and_no_absence(store, stub, verb):
    stub.answer = lambda _method, _path: LOGIN_PAGE
    with pytest.raises(StoreUnreachableError):
        await calls(store)[verb]()


async def test_a_write_that_is_led_to_a_login_page_is_none(store, stub):
    """obstore goes where a 303 points, without the body, and takes any 200 with an ETag for the store's."""

    def answer(_method, path):
        page = Answer(200, LOGIN_PAGE.body, {"ETag": '"5f3-612"'})
        return page if path == "/login" else Answer(303, headers={"Location": f"{stub.endpoint_url}/login"})

    stub.answer = answer
    assert await store.create("x/log/1", b"x") is Put.UNKNOWN
    with pytest.raises(StoreUnreachableError, match="not the store's; look for a proxy in between"):
        await store.put("x/data/1", [b"x"])


def keeps(body: bytes) -> Answer:
    """An object that is read."""
    return Answer(200, body, {"Last-Modified": "Tue, 24 Nov 2026 10:00:00 GMT", **STORED})


@pytest.mark.parametrize("code", ["AccessDenied", "UnauthorizedBlobOverwrite"])
async def test_credentials_that_may_not_overwrite_lose_a_race_as_others_do(store, stub, code):
    """scripts/deploy/policies: a producer creates, and nothing else."""
    stub.answer = lambda method, _: xml_error(403, code) if method == "PUT" else keeps(b"theirs")
    assert await store.create("x/log/1", b"mine") is Put.EXISTS


@pytest.mark.parametrize("code", ["AccessDenied", "UnauthorizedBlobOverwrite"])
async def test_an_upload_whose_answer_was_lost_is_there_also_if_it_may_not_be_sent_twice(store, stub, code):
    answers = iter([xml_error(500, "InternalError"), xml_error(403, code)] * 2)
    stub.answer = lambda method, _: next(answers) if method == "PUT" else keeps(b"mine")
    await store.put("x/data/1", [b"mi", b"ne"])
    with pytest.raises(RefusedError, match="cannot write x/data/1"):
        await store.put("x/data/1", [b"more"])


async def test_an_upload_is_there_if_it_reads_so_whatever_its_answer_looked_like(store, stub):
    stub.answer = lambda method, _: Answer(200, headers={"ETag": '"new form"'}) if method == "PUT" else keeps(b"x")
    await store.put("x/data/1", [b"x"])
    with pytest.raises(StoreUnreachableError, match="not the store's"):
        await store.put("x/data/1", [b"more"])


async def test_an_answer_of_any_length_is_told_in_a_line(store, stub):
    stub.answer = lambda _method, _path: Answer(403, b"<Code>" + b"A" * (4 << 20) + b"</Code>")
    with pytest.raises(RefusedError, match=r"\(403\)") as refused:
        await store.get("x/log/1")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("code", ["NoSuchKey", "BlobNotFound"])
@pytest.mark.parametrize("verb", ["get", "read"])
async def test_only_what_a_store_calls_absent_is_absent(store, stub, verb, code):
    stub.answer = lambda _method, _path: xml_error(404, code)
    assert await calls(store)[verb]() is None


async def test_a_range_beyond_the_end_is_empty(store, stub):
    stub.answer = lambda _method, _path: xml_error(416, "InvalidRange")
    assert await store.read_into("a", 5, memoryview(bytearray(1))) == 0


@pytest.mark.parametrize("code", ["BlobArchived", "BlobBeingRehydrated"])
async def test_an_archived_object_is_no_matter_of_credentials(store, stub, code):
    stub.answer = lambda _method, _path: xml_error(409, code)
    for verb in ("get", "read"):
        with pytest.raises(ArchivedError, match=f"archived .409 {code}.; restore it with the store's own tool"):
            await calls(store)[verb]()


OLD_REQUEST = (
    b"<Error><Code>AuthenticationFailed</Code><AuthenticationErrorDetail>Request date header too old: 'Mon'"
    b"</AuthenticationErrorDetail></Error>"
)
OLD_TOKEN = (
    b"<Error><Code>invalid_grant</Code>Invalid JWT: Token must be a short-lived token (60 minutes) and in a "
    b"reasonable timeframe.</Error>"
)


@pytest.mark.parametrize("page", [OLD_REQUEST, OLD_TOKEN], ids=["request", "token"])
async def test_a_wrong_clock_is_named_and_does_not_correct_itself(store, stub, page):
    stub.answer = lambda _method, _path: xml_error(404, "NoSuchKey")
    await store.get("x/log/1")
    stub.answer = lambda _method, _path: Answer(403, page)
    with pytest.raises(RefusedError, match=r"this machine's clock is wrong \(403.*; set it"):
        await store.get("x/log/1")


EXPIRED_SAS = Answer(
    403,
    b"<Error><Code>AuthenticationFailed</Code><AuthenticationErrorDetail>Signature not valid in the specified time "
    b"frame: Start [x] - Expiry [y] - Current [z]</AuthenticationErrorDetail></Error>",
)


@pytest.mark.parametrize("refusal", [xml_error(401, "ExpiredToken"), EXPIRED_SAS], ids=["token", "SAS"])
async def test_credentials_that_expire_are_waited_for_once_they_were_good(store, stub, refusal):
    stub.answer = lambda _method, _path: refusal
    with pytest.raises(RefusedError, match="refuses these credentials"):
        await store.get("x/log/1")
    stub.answer = lambda _method, _path: Answer(200, headers=STORED)
    assert await create_once.take_slot(store, "x/log/1", b"x") == create_once.Mine()
    stub.answer = lambda _method, _path: refusal
    with pytest.raises(StoreUnreachableError, match="it was allowed before; renew the credentials"):
        await store.get("elsewhere/1")
    assert isinstance(await create_once.take_slot(store, "x/log/2", b"x"), create_once.Unknown)


async def test_a_right_to_do_something_else_proves_nothing(store, stub):
    stub.answer = lambda _method, _path: xml_error(404, "NoSuchKey")
    await store.get("x/log/1")
    stub.answer = lambda _method, _path: xml_error(403, "AccessDenied")
    with pytest.raises(StoreUnreachableError, match="403 AccessDenied; it was allowed before"):
        await store.get("x/log/2")
    with pytest.raises(RefusedError, match="refuses these credentials or this action"):
        await store.create("x/log/1", b"x")


async def test_a_policy_against_deletes_is_told(store, stub, scheme):
    stub.answer = lambda _method, _path: xml_error(403 if scheme == "gs" else 409, "BlobImmutableDueToPolicy")
    with pytest.raises(RefusedError, match=r"cannot delete x/data/1 in .*BlobImmutableDueToPolicy"):
        await store.delete(["x/data/1"])


async def test_more_bytes_than_were_asked_for_are_no_answer(store, stub):
    headers = {"Content-Range": "bytes 0-0/1", "Last-Modified": "Tue, 24 Nov 2026 12:00:00 GMT", **STORED}
    stub.answer = lambda _method, _path: Answer(206, b"xyz", headers)
    with pytest.raises(StoreUnreachableError, match="more bytes than it was asked for"):
        await store.read_into("x/log/1", 0, memoryview(bytearray(1)))
    assert len(stub.requests) == 4
