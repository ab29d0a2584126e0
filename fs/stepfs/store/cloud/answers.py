"""The meaning of a failed request. obstore tells classes, not codes, and not the same ones in each version; but the text of
an error holds the server's status and body. So the text decides, and anything else is unknown: a create that may
have happened, an object that may be there.

object_store resends a 307 by itself, and 409 and 412 may be answers to its own first attempt. Both cost time, not
safety: `lake/slots.py` reads the slot.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from stepfs.errors import AbsentError, ArchivedError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.cloud.settings import TRUST, Words

_STATUS: Final = re.compile(
    r"Error performing [A-Z]+ \S+ in \S+ - Server returned non-2xx status code: (\d{3})\b"
)
_DELETED: Final = re.compile(r"Bulk delete request failed for key \S+: .*\(code: (\d{3})\)", re.DOTALL)
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>")
_REASON: Final = re.compile(r'(?:message|error): "([^"]+)"|\b(TimedOut|Incomplete\w+)\b')
_OF_PROVIDER: Final = re.compile(r"credential provider: (.+?)(?:\.\s|$)")  # its first sentence
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_TOKEN: Final = re.compile(r"performing token request|credential error|credential provider")
_SKEWED: Final = re.compile(r"date header too old|in a reasonable timeframe", re.IGNORECASE)
_EXPIRED: Final = re.compile(r"not valid in the specified time frame", re.IGNORECASE)
_ABSENT: Final = {"BlobNotFound", "NoSuchKey"}
_NO_CONTAINER: Final = {"ContainerNotFound", "NoSuchBucket"}
_ARCHIVED: Final = {"BlobArchived", "BlobBeingRehydrated"}
_THROTTLED: Final = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
_TAKEN: Final = (
    "UnauthorizedBlobOverwrite"  # of credentials that may create and not overwrite: Azure decides this first
)
_THROTTLED_CODES: Final = {"RequestRateTooHigh", "ServerBusy", "SlowDown", "TooManyRequests"}


class Verdict(enum.Enum):
    """The meaning of an answer, or of none."""

    EXISTS = enum.auto()
    CONFLICT = enum.auto()  # a 409 that decides nothing
    ABSENT = enum.auto()
    PAST_END = enum.auto()
    NO_CONTAINER = enum.auto()
    ARCHIVED = enum.auto()
    FORBIDDEN = enum.auto()
    EXPIRED = enum.auto()  # credentials that expired, or cannot be had just now
    SKEWED = enum.auto()
    DISTRUSTED = enum.auto()
    FOREIGN = enum.auto()  # a 404 that no store sent
    REFUSED = enum.auto()
    THROTTLED = enum.auto()
    UNREACHABLE = enum.auto()  # also every text that cannot be read


PASSING: Final = {Verdict.THROTTLED, Verdict.UNREACHABLE}  # another attempt makes sense
_OF_STATUS: Final[
    dict[int, Verdict]
] = {  # proxies answer with numbers, such as 520, that HTTPStatus does not know
    HTTPStatus.NOT_MODIFIED: Verdict.EXISTS,
    HTTPStatus.PRECONDITION_FAILED: Verdict.EXISTS,
    HTTPStatus.UNAUTHORIZED: Verdict.EXPIRED,
    HTTPStatus.FORBIDDEN: Verdict.FORBIDDEN,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: Verdict.PAST_END,
    HTTPStatus.REQUEST_TIMEOUT: Verdict.UNREACHABLE,
    HTTPStatus.NOT_IMPLEMENTED: Verdict.REFUSED,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """`said`: status and code, or why there is none."""

    verdict: Verdict
    said: str
    status: int = 0


UNSIGNED: Final = Answer(
    Verdict.UNREACHABLE, "the answer to a write is not the store's; look for a proxy in between"
)


def read_answer(text: str) -> Answer:
    """The answer that the text of obstore's error tells."""
    head, _, cause = text.partition("\n\nDebug source:")
    found = _STATUS.search(head)
    lead = head[: found.start()] if found else head
    status = int(found[1]) if found else 0
    named = _CODE.search(head, found.end()) if found else None
    code = named[1] if named else ""
    said = f"{status} {code}".strip() if found else _reason(head, cause)
    if not found and (deleted := _DELETED.search(head)):
        return Answer(_deleted(int(deleted[1])), f"{deleted[1]} in a batch", int(deleted[1]))
    if head.endswith("bytes long") and "Wanted range starting at" in head:
        return Answer(Verdict.PAST_END, said)
    if _SKEWED.search(head):
        return Answer(Verdict.SKEWED, said, status)
    if _NO_TOKEN.search(lead):
        return Answer(Verdict.EXPIRED, f"no token: {said}")
    if not found:
        distrusted = "InvalidCertificate" in cause
        return Answer(Verdict.DISTRUSTED if distrusted else Verdict.UNREACHABLE, said)
    return Answer(Verdict.EXPIRED if _EXPIRED.search(head) else _verdict(status, code), said, status)


def unusable(text: str) -> Answer:
    """The reason why no client can be made: wrong settings, of which nothing is quoted."""
    said = _QUOTED.sub("…", text.partition("\n\nDebug source:")[0])
    return Answer(Verdict.EXPIRED, " ".join(said.split())[:300])


def _verdict(status: int, code: str) -> Verdict:
    if code in _ARCHIVED:
        return Verdict.ARCHIVED
    if code == _TAKEN:
        return Verdict.EXISTS
    if status == HTTPStatus.CONFLICT:
        taken = code.endswith("AlreadyExists") or code.startswith("BlobImmutable")
        return Verdict.EXISTS if taken else Verdict.CONFLICT
    if status == HTTPStatus.NOT_FOUND:
        known = Verdict.ABSENT if code in _ABSENT else Verdict.FOREIGN
        return Verdict.NO_CONTAINER if code in _NO_CONTAINER else known
    if status in _THROTTLED or code in _THROTTLED_CODES:
        return Verdict.THROTTLED
    decided = status < HTTPStatus.INTERNAL_SERVER_ERROR
    return _OF_STATUS.get(status, Verdict.REFUSED if decided else Verdict.UNREACHABLE)


def _deleted(status: int) -> Verdict:
    """One blob of a batch, whose answer has a status alone."""
    if status == HTTPStatus.NOT_FOUND:
        return Verdict.ABSENT
    return _verdict(status, "")


def _reason(head: str, cause: str) -> str:
    if provided := _OF_PROVIDER.search(head):
        return provided[1][:300]
    found = _REASON.findall(cause)
    return ("; ".join(message or word for message, word in found) or " ".join(head.split()))[:300]


def create_outcome(answer: Answer) -> Put | None:
    """The outcome of a conditional create without a 200; None: definitely not done, raise `explain`."""
    decided = {Verdict.EXISTS: Put.EXISTS, Verdict.CONFLICT: Put.RETRY}
    return Put.UNKNOWN if answer.verdict in PASSING else decided.get(answer.verdict)


def explain(answer: Answer, url: str, doing: str, words: Words, *, passing: bool) -> StepfsError:
    """The error to raise when `doing` ('read a/b', …) failed on the store `url`.

    `passing`: the action was allowed before (`rights`), so a refusal for lack of rights counts as an outage.
    """
    kind: type[StepfsError] = RefusedError
    said = answer.said
    match answer.verdict:
        case Verdict.NO_CONTAINER:
            return AbsentError(
                f"the {words.container} of {url} does not exist ({said}); create it first, stepfs never does"
            )
        case Verdict.SKEWED:
            why = f"this machine's clock is wrong ({said}); set it"
        case Verdict.DISTRUSTED:
            why = f"the server's certificate does not verify ({said}); {TRUST}"
        case _ if passing:
            kind = StoreUnreachableError
            why = f"{said}; it was allowed before; renew the credentials of this role if it stays so"
        case Verdict.FORBIDDEN | Verdict.EXPIRED:
            refused = "the server refuses these credentials or this action"
            why = f"{refused if answer.status else 'no credentials can be used'} ({said}); {words.check_keys}"
        case Verdict.ARCHIVED:
            kind = ArchivedError
            why = f"the object is archived ({said}); restore it with the store's own tool"
        case Verdict.FOREIGN:
            kind = StoreUnreachableError
            why = (
                f"the answer ({said}) is not the store's; look for a proxy in between, {words.check_network}"
            )
        case Verdict.THROTTLED | Verdict.UNREACHABLE:
            kind = StoreUnreachableError
            why = f"{said}; {words.check_network}"
        case _:
            why = f"the server refuses the request ({said}); see what `stepfs doctor` says about it"
    return kind(f"cannot {doing} in {url}: {why}")
