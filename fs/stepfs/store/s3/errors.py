"""From a failed S3 request to the outcome of a create, or to one error with one line of advice."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from stepfs.errors import AbsentError, ArchivedError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.s3.settings import CHECK_KEYS, CHECK_NETWORK

FAILURES: Final = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    HTTPError,
    OSError,
)  # the errors of a request
CREDENTIALS: Final = (  # they exist, but cannot be renewed just now
    boto.CredentialRetrievalError,
    boto.SSOError,
    boto.TokenRetrievalError,
)
_EXPIRED: Final = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "RequestExpired",
    "TokenRefreshRequired",
}
_SETTINGS: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    *CREDENTIALS,
    boto.ProfileNotFound,
    boto.ConfigNotFound,
    boto.ConfigParseError,
    boto.InvalidConfigError,
    boto.InvalidRegionError,
)
_TRANSIENT_4XX: Final = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_TRANSIENT_CODES: Final = {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}  # with any status
_THROTTLED_CODES: Final = {
    "RequestLimitExceeded",
    "RequestThrottled",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_THROTTLED: Final = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
_FORBIDDEN: Final = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
_WRONG_REGION: Final = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "IllegalLocationConstraintException",
}
_BODY: Final = (
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.ReadTimeoutError,
    HTTPError,
    OSError,
)


def status_of(error: Exception) -> int:
    """HTTP status of the server's answer, 0 if there was none."""
    if isinstance(error, boto.ClientError):
        return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return 0


def code_of(error: Exception) -> str:
    """S3 error code, '' if there was none."""
    return error.response.get("Error", {}).get("Code", "") if isinstance(error, boto.ClientError) else ""


def is_absent(error: Exception) -> bool:
    """The object (not the bucket) is absent, and the answer is the store's own."""
    if status_of(error) != HTTPStatus.NOT_FOUND or code_of(error) == "NoSuchBucket":
        return False
    return not is_foreign(error)


def is_foreign(error: Exception) -> bool:
    """A 404 that no S3 server sent: a proxy's page, a gateway without a route.

    AWS, Ceph, MinIO, SeaweedFS answer a GET of an absent key with an XML error that names NoSuchKey, TOS with NotFound.
    A 404 with another body, or none, counts as the store's only with an S3 request id: gateways such as Envoy answer an
    unknown route with an empty 404. (Some mocks of S3 do so for absent keys, too; they cannot hold a lake.)
    """
    if not isinstance(error, boto.ClientError) or status_of(error) != HTTPStatus.NOT_FOUND:
        return False
    if code_of(error).startswith("NoSuch") or code_of(error) == "NotFound":
        return False
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return "x-amz-request-id" not in headers


def is_expired(error: Exception) -> bool:
    """The credentials have expired, or could not be renewed."""
    return isinstance(error, CREDENTIALS) or code_of(error) in _EXPIRED


def is_forbidden(error: Exception) -> bool:
    """The server forbids this action to these credentials."""
    return status_of(error) in _FORBIDDEN and not is_archived(error)


def is_archived(error: Exception) -> bool:
    """The object lies in an archive class, from which it is to be restored first."""
    return code_of(error) == "InvalidObjectState"


def is_past_end(error: Exception) -> bool:
    """A range that starts at or beyond the end of the object."""
    return status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE


def is_distrusted(error: Exception) -> bool:
    """The server's certificate does not verify: nothing was sent to it."""
    return isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)


def is_skewed(error: Exception) -> bool:
    """The request was signed long before it arrived: by a wrong clock, or by a process that was suspended in
    between."""
    return code_of(error) == "RequestTimeTooSkewed"


def broke_in_body(error: Exception) -> bool:
    """The answer began and its body did not arrive whole: request the rest."""
    return isinstance(error, _BODY)


def create_outcome(error: Exception) -> Put | None:
    """The outcome of a conditional create without a 200; None: definitely not done, raise `explain`."""
    if isinstance(error, (*_SETTINGS, boto.ParamValidationError)) or is_distrusted(error):
        return None
    status = status_of(error)
    if status == HTTPStatus.PRECONDITION_FAILED:
        return Put.EXISTS
    if status == HTTPStatus.CONFLICT:
        return Put.EXISTS if code_of(error).endswith("AlreadyExists") else Put.RETRY
    definite = HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    if (definite and not _is_transient(error)) or status == HTTPStatus.NOT_IMPLEMENTED:
        return None
    return Put.UNKNOWN


def _is_transient(error: Exception) -> bool:
    """The refusal is temporary: throttled, or damaged on the way."""
    return status_of(error) in _TRANSIENT_4XX or is_transient(code_of(error))


def is_transient(code: str) -> bool:
    """Whether an S3 error code, also that of one key of several, is temporary."""
    return code in _TRANSIENT_CODES


def is_throttled(status: int, code: str) -> bool:
    """Whether an answer asks for fewer requests."""
    return status in _THROTTLED or code in _THROTTLED_CODES


def explain(error: Exception, url: str, doing: str, *, passing: bool = False) -> StepfsError:
    """The error to raise (from `error`) when `doing` ('read a/b', …) failed on the store `url`.

    `passing`: the action was allowed before (`rights`), so a refusal for lack of rights counts as an outage.
    """
    code, status = code_of(error), status_of(error)
    said = f"({code or status})"
    kind: type[StepfsError] = RefusedError
    if code == "NoSuchBucket":
        bucket = url.removeprefix("s3://").partition("/")[0]
        return AbsentError(f"bucket {bucket} does not exist; create it first, stepfs never does")
    if passing:
        kind = StoreUnreachableError
        why = f"{_one_line(error)}; it was allowed before; renew the credentials of this role if it stays so"
    elif is_foreign(error):
        kind = StoreUnreachableError
        why = "the answer (404) is no S3 server's; look for a proxy in between, check AWS_ENDPOINT_URL_S3"
    elif isinstance(error, _SETTINGS):
        why = f"{_one_line(error)}; {CHECK_KEYS}"
    elif is_distrusted(error):
        why = f"{_one_line(error)}; set AWS_CA_BUNDLE to its authority's certificate, or correct the URL"
    elif lasting := _lasting(error):
        kind = ArchivedError if is_archived(error) else RefusedError
        why = lasting
    elif is_forbidden(error) or is_expired(error):
        why = f"the server refuses these credentials or this action {said}; {CHECK_KEYS}"
    elif not _is_transient(error) and (400 <= status < 500 or status == HTTPStatus.NOT_IMPLEMENTED):
        why = f"the server refuses the request: {_one_line(error)}; see what `stepfs doctor` says about it"
    else:
        kind = StoreUnreachableError
        why = f"{_one_line(error)}; {CHECK_NETWORK}"
    return kind(f"cannot {doing} in {url}: {why}")


def _lasting(error: Exception) -> str:
    """The remedy for an error that renewed credentials do not change; '' for another error."""
    said = f"({code_of(error)})"
    if is_archived(error):
        return f"the object is archived {said}; restore it with the store's own tool"
    if is_skewed(error):
        return f"this machine's clock is wrong {said}; set it"
    if code_of(error) in _WRONG_REGION:
        return f"the bucket is in another region {said}; set AWS_REGION to it"
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
