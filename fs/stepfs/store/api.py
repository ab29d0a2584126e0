"""The object store protocol: verbs, names of objects, and options of the way to a store.

Verbs raise `StoreUnreachableError` once their own retries are spent, `RefusedError` for missing rights, `AbsentError` when the
bucket or root is gone. Keys are relative to the lake's URL.
"""

from __future__ import annotations

import enum
import re
import threading
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from stepfs.errors import UsageError

_KEY: Final = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9_=.-]*/)*[A-Za-z0-9_=-][A-Za-z0-9_=.-]*")
_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9_=.-]*/)*(?:[A-Za-z0-9_=-][A-Za-z0-9_=.-]*)?")
KEY_BYTES_MAX: Final = 512
DELETE_RESENT_S_MAX: Final = 5.0  # behind the first attempt; to put a store back to an older copy takes longer

Buffer = bytes | bytearray | memoryview
Progress = Callable[[int], None]  # called with the bytes of a read that are in its buffer so far


def check_key(key: str) -> str:
    """Returns `key`; `UsageError` if it is not a relative object name."""
    if len(key) > KEY_BYTES_MAX or _KEY.fullmatch(key) is None:
        raise UsageError(f"not an object key: {key[:80]!r}; keys are relative paths of plain components")
    return key


def check_prefix(prefix: str) -> str:
    """Returns `prefix` ('' lists everything); `UsageError` if no key could start with it."""
    if len(prefix) > KEY_BYTES_MAX or _PREFIX.fullmatch(prefix) is None:
        raise UsageError(f"not a key prefix: {prefix[:80]!r}; prefixes are relative paths of plain components")
    return prefix


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of every kind of store; each kind ignores options that it does not know. The one place to add another."""

    endpoint_url: str | None = None  # an S3-compatible server; None: the AWS chain decides
    connections: int | None = None  # ranged reads under way at a time; None: the store's own limit
    of_origin: bool = False  # a fork's parent: the server of its own profile beats `endpoint_url`

    def at_endpoint(self, endpoint_url: str | None) -> StoreOptions:
        """These options, at that server unless they name one."""
        return replace(self, endpoint_url=self.endpoint_url or endpoint_url)

    def for_origin(self) -> StoreOptions:
        """The same for the lake that a fork was made of."""
        return replace(self, of_origin=True)


def ignore_progress(landed: int) -> None:
    """Ignore progress, for callers that need none."""


def byte_views(parts: Sequence[Buffer]) -> list[memoryview]:
    """The parts that have bytes, as flat views."""
    return [view for part in parts if len(view := memoryview(part).cast("B"))]


class Put(enum.Enum):
    """How a conditional create ended."""

    CREATED = "created"  # this request's bytes are the object
    EXISTS = "exists"  # the key was taken; maybe by an earlier attempt of ours: read it (hazard 2)
    RETRY = "retry"  # 409: undecided by the server, send the same bytes again shortly (hazard 3)
    UNKNOWN = "unknown"  # timeout, reset, 5xx: may have happened, or may still happen


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object."""

    key: str
    size: int
    age_s: float = 0.0  # see `Store.list`; 0 unless asked for


@dataclass(slots=True)
class Counts:
    """Requests sent and bytes moved; tests and benchmarks assert on these."""

    get: int = 0
    create: int = 0
    put: int = 0
    list: int = 0
    delete: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    throttled: int = 0  # "slow down" answers, also those that a retry made good
    keys: MutableSequence[tuple[str, str]] | None = None  # (verb, key) trace, when a test sets a list
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def note(self, verb: str, *keys: str) -> None:
        """Count one request of `verb` ('get', 'create', 'put', 'list', 'delete'); only a delete names several keys."""
        self.add(**{verb: 1})
        if self.keys is not None:
            self.keys.extend((verb, key) for key in keys)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    @property
    def requests(self) -> int:
        return self.get + self.create + self.put + self.list + self.delete


class Store(Protocol):
    """A prefix of an object store, or a directory that behaves like one."""

    url: str
    counts: Counts

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        """The whole object, None if absent. `CorruptError` if it is larger than `bytes_max`."""
        ...

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        """Fill `buffer` with bytes from `offset`; one request, no copy beyond the socket's.

        Returns the number of bytes (fewer than the buffer's at the end of the object), None if absent. `landed` is
        called with the number of bytes in `buffer` each time it grows, in the thread that filled it.
        """
        ...

    async def create(self, key: str, body: bytes) -> Put:
        """Create `key` only if absent: exactly one attempt, durable when CREATED."""
        ...

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
        """Upload the concatenation of `parts` under a name that no other writer uses; retried, durable on return.

        `crc32c`: that of the concatenation, if the caller knows it; a store that verifies arriving bytes uses it.
        """
        ...

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> list[Entry]:
        """Objects under `prefix` with key > `after`, in key order, at most `limit`.

        With `ages`, each entry holds the least number of seconds that the object has existed, by the store's own clock
        and as of the answer: the caller's clock is not used. 0 when the store gives no age.
        """
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete in batches; an absent key is fine (idempotent). No batch is sent again `DELETE_RESENT_S_MAX` after it was sent
        first: the caller looks whether the store still is what it was, and calls again.
        """
        ...

    async def aclose(self) -> None:
        """Release threads and connections."""
        ...
