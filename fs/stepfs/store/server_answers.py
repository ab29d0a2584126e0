"""What stores on servers share: the meaning of a failed request, and the bytes of a read.

What cannot be read is unknown: a create that may have happened. Once a read is abandoned, no byte is written to its buffer,
and its connection is shut down.
"""

import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from stepfs.errors import AbsentError, ArchivedError, CorruptError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.store.api import Progress, Put
from stepfs.store.settings import StoreTexts

PIECE_BYTES: Final = 1 << 20  # fits into a CPU's cache


class Verdict(enum.Enum):
    """The meaning of an answer, or of none."""

    EXISTS = enum.auto()
    CONFLICT = enum.auto()  # a 409 that decides nothing
    ABSENT = enum.auto()
    PAST_END = enum.auto()
    NO_CONTAINER = enum.auto()
    ELSEWHERE = enum.auto()  # the bucket is in another region
    MOVED = enum.auto()  # to another address: from http:// to https://, as a rule
    ARCHIVED = enum.auto()
    FORBIDDEN = enum.auto()  # this action, to these credentials
    EXPIRED = enum.auto()  # credentials that expired, or cannot be had just now: every action
    UNSET = enum.auto()  # no credentials, or settings that make no sense
    SKEWED = enum.auto()  # signed long before it arrived: by a wrong clock, or before the process was suspended
    DISTRUSTED = enum.auto()  # the certificate does not verify: nothing was sent
    FOREIGN = enum.auto()  # a 404 that no store sent: a proxy's page, a gateway without a route
    REFUSED = enum.auto()
    THROTTLED = enum.auto()
    UNREACHABLE = enum.auto()  # also all that cannot be read


PASSING: Final = {Verdict.THROTTLED, Verdict.UNREACHABLE}  # another attempt makes sense
MAY_COME_LATE: Final = {Verdict.EXPIRED, Verdict.UNSET, Verdict.SKEWED}  # to a machine that has just started
_CODES: Final = {
    Verdict.NO_CONTAINER: ("ContainerNotFound", "NoSuchBucket"),
    Verdict.ELSEWHERE: ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"),
    Verdict.ARCHIVED: ("BlobArchived", "BlobBeingRehydrated", "InvalidObjectState"),
    Verdict.EXISTS: ("UnauthorizedBlobOverwrite",),  # to those who may create alone, Azure says this first
    Verdict.EXPIRED: (
        "ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "TokenRefreshRequired",
    ),
    Verdict.SKEWED: ("RequestTimeTooSkewed",),
    Verdict.THROTTLED: (
        "RequestLimitExceeded", "RequestRateTooHigh", "RequestThrottled", "ServerBusy", "ServiceUnavailable", "SlowDown",
        "Throttling", "ThrottlingException", "TooManyRequests", "TooManyRequestsException",
    ),
    Verdict.UNREACHABLE: ("BadDigest", "IncompleteBody", "InternalError", "RequestTimeout"),
}  # fmt: skip
_OF_CODE: Final = {code: verdict for verdict, codes in _CODES.items() for code in codes}
# By number: proxies answer with some, such as 520, that HTTPStatus does not know.
_OF_STATUS: Final[dict[int, Verdict]] = {
    HTTPStatus.NOT_MODIFIED: Verdict.EXISTS,
    **dict.fromkeys((301, 302, 303, 307, 308), Verdict.MOVED),
    HTTPStatus.PRECONDITION_FAILED: Verdict.EXISTS,
    HTTPStatus.UNAUTHORIZED: Verdict.EXPIRED,
    HTTPStatus.FORBIDDEN: Verdict.FORBIDDEN,
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: Verdict.PAST_END,
    HTTPStatus.REQUEST_TIMEOUT: Verdict.UNREACHABLE,
    HTTPStatus.TOO_MANY_REQUESTS: Verdict.THROTTLED,
    HTTPStatus.SERVICE_UNAVAILABLE: Verdict.THROTTLED,
    HTTPStatus.NOT_IMPLEMENTED: Verdict.REFUSED,
}


_ELSEWHERE: Final = {
    Verdict.ELSEWHERE: "the bucket is in another region ({}); set AWS_REGION to it",
    Verdict.MOVED: "the server sends its clients elsewhere ({}); name that place as the endpoint, perhaps with https://",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """`reason`: status and code, or why there is none; `whole`: the library's own line, where that says more."""

    verdict: Verdict
    reason: str
    status: int = 0
    whole: str = ""


def verdict_of(status: int, code: str) -> Verdict:
    """The meaning of an HTTP status and an error code ('' without one), the code first."""
    if code in _OF_CODE:
        return _OF_CODE[code]
    if status == HTTPStatus.CONFLICT:
        taken = code.endswith("AlreadyExists") or code.startswith("BlobImmutable")
        return Verdict.EXISTS if taken else Verdict.CONFLICT
    if status == HTTPStatus.NOT_FOUND:
        return Verdict.ABSENT if code in {"BlobNotFound", "NoSuchKey"} else Verdict.FOREIGN
    refused = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    return _OF_STATUS.get(status, Verdict.REFUSED if refused else Verdict.UNREACHABLE)


def is_passing(code: str) -> bool:
    """Whether the refusal of one key of several is temporary."""
    return _OF_CODE.get(code) in PASSING


def is_throttled(status: int, code: str) -> bool:
    """Whether an answer asks for fewer requests."""
    return Verdict.THROTTLED in {_OF_STATUS.get(status), _OF_CODE.get(code)}


def create_outcome(answer: Answer) -> Put | None:
    """The outcome of a conditional create without a 200; None: definitely not done, raise `explain`."""
    decided = {Verdict.EXISTS: Put.EXISTS, Verdict.CONFLICT: Put.RETRY}
    return Put.UNKNOWN if answer.verdict in PASSING else decided.get(answer.verdict)


def explain(answer: Answer, url: str, doing: str, words: StoreTexts, *, passing: bool = False) -> StepfsError:
    """The error to raise when `doing` ('read a/b', …) failed on the store `url`.

    `passing`: the action was allowed before (`calls.Rights`), so a refusal for lack of rights counts as an outage.
    """
    kind: type[StepfsError] = RefusedError
    reason, whole = answer.reason, answer.whole or answer.reason
    match answer.verdict:
        case Verdict.NO_CONTAINER:
            return AbsentError(
                f"the {words.container} of {url} does not exist ({reason}); create it first, stepfs never does"
            )
        case Verdict.SKEWED:
            why = f"this machine's clock is wrong ({reason}); set it"
        case Verdict.DISTRUSTED:
            why = f"the server's certificate does not verify ({reason}); {words.trust}"
        case _ if passing:
            kind = StoreUnreachableError
            why = f"{whole}; it was allowed before; renew the credentials of this role if it stays so"
        case Verdict.ELSEWHERE | Verdict.MOVED:
            why = _ELSEWHERE[answer.verdict].format(reason)
        case Verdict.FORBIDDEN | Verdict.EXPIRED | Verdict.UNSET:
            refused = "the server refuses these credentials or this action"
            why = f"{refused if answer.status else 'no credentials can be used'} ({reason}); {words.check_keys}"
        case Verdict.ARCHIVED:
            kind = ArchivedError
            why = f"the object is archived ({reason}); restore it with the store's own tool"
        case Verdict.FOREIGN:
            kind = StoreUnreachableError
            why = f"the answer ({reason}) is not the store's; look for a proxy in between, {words.check_network}"
        case Verdict.THROTTLED | Verdict.UNREACHABLE:
            kind = StoreUnreachableError
            why = f"{whole}; {words.check_network}"
        case _:
            why = f"the server refuses the request ({whole}); see what `stepfs doctor` says about it"
    return kind(f"cannot {doing} in {url}: {why}")


def not_yet(answer: Answer, url: str, doing: str) -> StoreUnreachableError:
    """The same as `explain`, for a machine whose role gives credentials: after the start they, or the right time, may be late."""
    why = (
        f"this machine's clock is not set yet ({answer.reason}); retry, or set it"
        if answer.verdict is Verdict.SKEWED
        else f"the role of this machine has no credentials yet ({answer.reason}); retry, or attach a role that may do this"
    )
    return StoreUnreachableError(f"cannot {doing} in {url}: {why}")


def whole_body(
    pieces: Iterable[bytes], size: int, bytes_max: int, what: str, sign_of_life: Callable[[], None]
) -> bytes:
    """The body of `what`, an object of `size` bytes; `CorruptError` before the first piece if it is too large.

    `size` 0: the server did not say; then `CorruptError` as soon as it is too large.
    """
    if size > bytes_max:
        raise CorruptError(f"{what} has {size} bytes, at most {bytes_max} make sense")
    found, got = [], 0
    for piece in pieces:
        found.append(piece)
        got += len(piece)
        if got > bytes_max:
            raise CorruptError(f"{what} has more than {bytes_max} bytes, which make no sense")
        sign_of_life()
    return found[0] if len(found) == 1 else b"".join(found)


class AbandonedReadError(Exception):
    """The owner has abandoned the buffer; no caller sees this error."""


class ReadTarget:
    """The caller's buffer, filled from the front by one thread at a time."""

    def __init__(
        self, buffer: memoryview, landed: Progress, on_sign_of_life: Callable[[], None] = lambda: None
    ) -> None:
        self._buffer = buffer.cast("B")
        self._sign_of_life = on_sign_of_life
        self._landed = landed
        self._filling = threading.Lock()
        self._ending = threading.Lock()  # held for moments only, so `abandon` never waits for a connection
        self._end: Callable[[], object] | None = None
        self._abandoned = False
        self.done = 0
        self.answers = 0  # responses that began

    @property
    def remaining(self) -> int:
        return len(self._buffer) - self.done

    def check(self) -> None:
        if self._abandoned:
            raise AbandonedReadError

    @contextmanager
    def connected(self, end: Callable[[], object]) -> Iterator[None]:
        """Within, `abandon` calls `end` to wake the thread. Raises on leaving, too, if that may have happened."""
        with self._ending:
            self._end = end
        try:
            self.check()
            yield
        finally:
            with self._ending:
                self._end = None
        self.check()

    def append(self, piece: bytes) -> None:
        with self._filling:
            self.check()
            if len(piece) > self.remaining:
                raise ConnectionError("the server sent more bytes than it was asked for")
            self._buffer[self.done : self.done + len(piece)] = piece
            self._add(len(piece))
        self._sign_of_life()

    def receive(self, receive: Callable[[memoryview], int]) -> None:
        """The next piece by calls that fill a view from its front. They may block, because `abandon` ends them."""
        with self._filling:
            self.check()
            room = self._buffer[self.done : self.done + PIECE_BYTES]
            got = 0
            try:
                while got < len(room):
                    count = receive(room[got:])
                    if not count:
                        raise ConnectionResetError("the connection ended in the body")
                    got += count
                    self._sign_of_life()
            finally:
                if got:
                    self._add(got)

    def _add(self, count: int) -> None:
        self.done += count
        self._landed(self.done)

    def abandon(self) -> None:
        """Release the buffer, from another thread: no byte is written to it after this."""
        with self._ending:
            self._abandoned = True
            if self._end is not None:
                # Finished, closed, or (urllib3's RuntimeError) back in the pool already.
                with suppress(AttributeError, OSError, RuntimeError, ValueError):
                    self._end()
        with self._filling:
            pass  # the piece that was being written is complete now
