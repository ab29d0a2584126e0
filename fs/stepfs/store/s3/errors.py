"""botocore's errors as answers: what each says of the request."""

from typing import Final

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from stepfs.store.server_answers import Answer, Verdict, verdict_of

FAILURES: Final = (  # the errors of a request
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    HTTPError,
    OSError,
)
_EXPIRED: Final = (  # credentials exist, but cannot be renewed just now
    boto.CredentialRetrievalError,
    boto.SSOError,
    boto.TokenRetrievalError,
)
_UNSET: Final = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound, boto.ConfigNotFound,
    boto.ConfigParseError, boto.InvalidConfigError, boto.InvalidRegionError,
)  # fmt: skip
_BODY: Final = (boto.IncompleteReadError, boto.ResponseStreamingError, boto.ReadTimeoutError, HTTPError, OSError)


def read_error(error: Exception) -> Answer:
    line = " ".join(str(error).split())[:300]
    if not isinstance(error, boto.ClientError):
        return Answer(_without_answer(error), line)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response.get("Error", {}).get("Code", "")
    verdict = verdict_of(status, code)
    if verdict is Verdict.FOREIGN and _is_own(error, code):
        verdict = Verdict.ABSENT
    return Answer(verdict, code or str(status), status, line)


def _without_answer(error: Exception) -> Verdict:
    if isinstance(error, _EXPIRED):
        return Verdict.EXPIRED
    if isinstance(error, _UNSET):
        return Verdict.UNSET
    if isinstance(error, boto.ParamValidationError):
        return Verdict.REFUSED
    distrusted = isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
    return Verdict.DISTRUSTED if distrusted else Verdict.UNREACHABLE


def _is_own(error: boto.ClientError, code: str) -> bool:
    """Whether an S3 server sent this 404.

    AWS, Ceph, MinIO, SeaweedFS answer a GET of an absent key with an XML error that names NoSuchKey, TOS with NotFound.
    A 404 with another body, or none, counts as the store's only with an S3 request id: gateways such as Envoy answer an
    unknown route with an empty 404. (Some mocks of S3 do so for absent keys, too; they cannot hold a lake.)
    """
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return code.startswith("NoSuch") or code == "NotFound" or "x-amz-request-id" in headers


def broke_in_body(error: Exception) -> bool:
    """The answer began and its body did not arrive whole: request the rest."""
    return isinstance(error, _BODY)
