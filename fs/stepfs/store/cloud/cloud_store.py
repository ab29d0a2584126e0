"""Google's and Azure's stores, by obstore.

object_store resends a 307 by itself, and 409 and 412 may answer its own first attempt: `lake/create_once` reads the slot.
Cancellation abandons all but `create`; an abandoned thread touches no memory of the caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from http.client import HTTPException
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import obstore
import trio
from obstore.exceptions import BaseError

from stepfs._internal import entropy
from stepfs.errors import StepfsError
from stepfs.store import server_answers
from stepfs.store.api import (
    DELETE_RESENT_S_MAX,
    Buffer,
    Counts,
    Entry,
    Progress,
    Put,
    byte_views,
    check_key,
    check_prefix,
    ignore_progress,
)
from stepfs.store.calls import Calls, age_s, http_date
from stepfs.store.cloud.errors import read_answer, unusable
from stepfs.store.cloud.place import Place
from stepfs.store.silence import Silence

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult

    from stepfs.store.cloud.place import Client


UNSIGNED: Final = server_answers.Answer(
    server_answers.Verdict.UNREACHABLE, "the answer to a write is not the store's; look for a proxy in between"
)
_KEEP_S: Final = 600.0  # clocks drift, if slowly
_ASK_AGAIN_S: Final = 60.0  # a store that did not tell
_ANSWER_S: Final = 5.0

T = TypeVar("T")
_ATTEMPTS_MAX: Final = 4
_RETRIED: Final = server_answers.PASSING | {server_answers.Verdict.CONFLICT}
_PAUSE_S: Final = 0.25  # at most, before the second attempt

Listing = list[Entry]  # inside the class `list` is the verb
Failures = list[StepfsError]
SINGLE_BYTES_MAX: Final = 96 << 20
_PART_BYTES: Final = 16 << 20
_PARTS_AT_ONCE: Final = 4
_PART_RETRIES: Final = 3
_DELETES_AT_ONCE: Final = 16


class StoreClock:
    """The Date of one unsigned HEAD to `endpoint`, kept as an offset to the monotonic clock. Thread-safe, blocking."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._asked_s = -_KEEP_S
        self._date: datetime | None = None

    def now(self) -> datetime | None:
        """Not later than the store's present time; None if it does not tell."""
        with self._lock:
            if time.monotonic() - self._asked_s >= (_KEEP_S if self._date else _ASK_AGAIN_S):
                self._date = self._ask()
                self._asked_s = time.monotonic()  # when it was told: later than the store said so
            return self._date and self._date + timedelta(seconds=time.monotonic() - self._asked_s)

    def _ask(self) -> datetime | None:
        request = Request(self._endpoint, method="HEAD")  # noqa: S310 - an endpoint is http or https
        try:
            with urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
                said = answer.headers["Date"]
        except HTTPError as error:  # the usual answer to an unsigned request
            said = error.headers["Date"]
        except (OSError, HTTPException):
            return None
        return http_date(said)


class Timeouts(NamedTuple):
    """Seconds without a byte; `upload`: for a whole body, since obstore's time begins with the request."""

    commit: float = 15.0
    data: float = 20.0
    upload: float = 120.0


TIMEOUTS: Final = Timeouts()


class RequestError(Exception):
    """A request failed; `answer` says how."""

    def __init__(self, answer: server_answers.Answer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


class Requests:
    """Sends one store's requests. Those of a verb share a client with that verb's timeout."""

    def __init__(self, place: Place, counts: Counts, timeouts: Timeouts, calls: Calls) -> None:
        self._place = place
        self._counts = counts
        self._calls = calls
        self._timeouts_s = {"create": timeouts.commit, "put": timeouts.upload}
        self._data_timeout_s = timeouts.data
        self._clients: dict[tuple[float, int], Client] = {}
        self._making = threading.Lock()

    async def call(
        self, verb: str, keys: tuple[str, ...], work: Callable[[Client], T], *, data: bool = False, retries: int = 0
    ) -> T:
        """Run `work` in a thread, again while its failures pass (a delete: see `Store.delete`); a create once, and to its end.

        `data`: it moves a body of any size. `retries` of obstore itself, within one attempt.
        """

        def attempt() -> T:
            try:
                client = self._client(verb, retries)
            except BaseError as error:  # settings that make no sense, in a text that may quote them
                raise RequestError(unusable(str(error))) from None
            try:
                self._counts.note(verb, *keys)
                return work(client)
            except (BaseError, OSError) as error:
                raise self._failed(str(error)) from error

        once, began_s = verb == "create", trio.current_time()
        for number in range(_ATTEMPTS_MAX):
            try:
                result = await self._calls.run(verb, attempt, data=data, abandon=not once)
            except RequestError as error:
                late = verb == "delete" and trio.current_time() - began_s > DELETE_RESENT_S_MAX
                if once or late or error.answer.verdict not in _RETRIED or number == _ATTEMPTS_MAX - 1:
                    raise
            else:
                self._calls.rights.prove(verb, keys)
                return result
            await trio.sleep(entropy.uniform(0.0, _PAUSE_S * 2**number))
        raise AssertionError

    def _client(self, verb: str, retries: int) -> Client:
        timeout_s = self._timeouts_s.get(verb, self._data_timeout_s)
        with self._making:
            if (timeout_s, retries) not in self._clients:
                self._clients[timeout_s, retries] = self._place.client(timeout_s, retries=retries)
            return self._clients[timeout_s, retries]

    def _failed(self, text: str) -> RequestError:
        answer = read_answer(text)
        if answer.status:
            self._calls.sign_of_life()
        self._counts.add(throttled=answer.verdict is server_answers.Verdict.THROTTLED)
        return RequestError(answer)

    def close(self) -> None:
        self._clients.clear()


class CloudStore:
    """`stepfs.store.api.Store` at `place`; no request is sent before the first call."""

    def __init__(
        self,
        place: Place,
        *,
        timeouts: Timeouts = TIMEOUTS,
        data_threads: int | None = None,
        silence: Silence | None = None,
    ) -> None:
        self.url = place.url
        self.counts = Counts()
        self._place = place
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        self._calls = Calls(place.url, place.words, data_threads, silence)
        self._requests = Requests(place, self.counts, timeouts, self._calls)
        self._clock = StoreClock(place.endpoint)

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        name = self._name(key)

        def fetch(client: Client) -> bytes:
            found = obstore.get(client, name)
            pieces = found.stream(min_chunk_size=server_answers.PIECE_BYTES)
            what = f"{self.url}/{key}"
            return server_answers.whole_body(pieces, found.meta["size"], bytes_max, what, self._calls.sign_of_life)

        found = await self._get(key, fetch, bytes)
        self.counts.add(bytes_read=len(found or b""))
        return found

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        name = self._name(key)
        target = server_answers.ReadTarget(buffer, landed, self._calls.sign_of_life)

        def fetch(client: Client) -> int:
            target.check()
            first = offset + target.done  # the first attempt may have broken off in the body
            found = obstore.get(client, name, options={"range": (first, first + target.remaining)})
            for piece in found.stream(min_chunk_size=server_answers.PIECE_BYTES):
                target.append(piece)
            return target.done

        if target.remaining == 0:
            return 0
        try:
            return await self._get(key, fetch, lambda: target.done, data=True)
        finally:
            target.abandon()  # after any end of the wait: a thread may still be reading
            self.counts.add(bytes_read=target.done)

    async def create(self, key: str, body: bytes) -> Put:
        name = self._name(key)

        def send(client: Client) -> None:
            self.counts.add(bytes_written=len(body))
            self._check(obstore.put(client, name, body, mode="create", use_multipart=False))

        try:
            await self._requests.call("create", (key,), send)
        except RequestError as error:
            outcome = server_answers.create_outcome(error.answer)
            if error.answer.verdict is server_answers.Verdict.FORBIDDEN and await self._read_back(key) is not None:
                outcome = Put.EXISTS  # to credentials that may create and not overwrite
            if outcome is None:
                raise self._calls.explained(error.answer, "create", key) from error
            if outcome is Put.EXISTS:
                self._calls.rights.prove("create", [key])
            return outcome
        return Put.CREATED

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:  # noqa: ARG002
        """See `Store.put`. `crc32c` is not sent, since obstore has no place for it: TLS guards the way."""
        name = self._name(key)
        views = byte_views(parts)
        size = sum(map(len, views))
        single = size <= SINGLE_BYTES_MAX
        abandoned = threading.Event()

        def copied(piece: bytes) -> bytes:
            if abandoned.is_set():
                raise server_answers.AbandonedReadError  # the views may have changed before they were copied
            self.counts.add(bytes_written=len(piece))
            return piece

        def send(client: Client) -> None:
            if single:
                self._check(obstore.put(client, name, copied(b"".join(views)), use_multipart=False))
                return
            cuts = ((view, start) for view in views for start in range(0, len(view), _PART_BYTES))
            pieces = (copied(bytes(view[start : start + _PART_BYTES])) for view, start in cuts)
            self.counts.add(put=-(-size // _PART_BYTES))
            obstore.put(client, name, pieces, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

        try:
            await self._requests.call("put", (key,), send, data=True, retries=0 if single else _PART_RETRIES)
        except RequestError as error:
            doubtful = error.answer is UNSIGNED or error.answer.verdict in {
                server_answers.Verdict.EXISTS,
                server_answers.Verdict.FORBIDDEN,
            }
            landed = single and doubtful and await self._read_back(key) == b"".join(views)
            if not landed:  # else an attempt that seemed lost has
                raise self._calls.explained(error.answer, "put", key, "write") from error
        finally:
            abandoned.set()

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> Listing:
        wanted = self._prefix + check_prefix(prefix)
        directory = wanted[: wanted.rfind("/") + 1]  # obstore lists directories alone
        rows_max = self._place.keys_per_page
        offset = self._prefix + after if after else ""
        found: Listing = []
        stream: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page(client: Client) -> Sequence[ObjectMeta]:
            nonlocal stream
            begun, stream = stream, None  # a broken listing begins anew behind its last row
            begun = begun or obstore.list(client, directory, offset=offset or None, chunk_size=rows_max)
            page = next(begun, ())
            stream = begun
            return page

        now = await trio.to_thread.run_sync(self._clock.now) if ages else None
        while limit is None or len(found) < limit:
            try:
                page = await self._requests.call("list", (prefix,), next_page)
            except RequestError as error:
                raise self._calls.explained(error.answer, "list", prefix) from error
            # Azure may begin at `offset` itself, and Azurite begins at the beginning.
            rows = (row for row in page if row["path"] > offset and row["path"].startswith(wanted))
            found += [self._entry(row, now) for row in rows]
            if len(page) < rows_max:
                break
            offset = max(offset, page[-1]["path"])
        return found[:limit]

    async def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        size = self._place.keys_per_delete
        waiting = iter([tuple(names[start : start + size]) for start in range(0, len(names), size)])
        failed: Failures = []

        async def work() -> None:
            for batch in waiting:
                try:
                    await self._delete(batch)
                except StepfsError as error:
                    failed.append(error)
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(min(_DELETES_AT_ONCE, -(-len(names) // size))):
                nursery.start_soon(work)
        for error in failed[:1]:
            raise error

    async def aclose(self) -> None:
        self._requests.close()

    async def _delete(self, keys: tuple[str, ...]) -> None:
        try:
            await self._requests.call(
                "delete", keys, lambda client: obstore.delete(client, [self._prefix + key for key in keys])
            )
        except RequestError as error:
            if len(keys) > 1 and error.answer.verdict not in server_answers.PASSING:
                # The text tells the first failure of many, such as that a key was absent.
                for key in keys:
                    await self._delete((key,))
            elif error.answer.verdict is not server_answers.Verdict.ABSENT:
                raise self._calls.explained(error.answer, "delete", keys[0]) from error

    async def _get(
        self, key: str, fetch: Callable[[Client], T], past_end: Callable[[], T], *, data: bool = False
    ) -> T | None:
        try:
            return await self._requests.call("get", (key,), fetch, data=data)
        except RequestError as error:
            if error.answer.verdict is server_answers.Verdict.PAST_END:
                return past_end()
            if error.answer.verdict is not server_answers.Verdict.ABSENT:
                raise self._calls.explained(error.answer, "get", key, "read") from error
        self._calls.rights.prove("get", [key])
        return None

    async def _read_back(self, key: str) -> bytes | None:
        """The object that a write may have found in its place; None if that cannot be told."""
        try:
            return await self.get(key)
        except StepfsError:
            return None

    def _check(self, result: PutResult) -> None:
        if not self._place.wrote(result):
            raise RequestError(UNSIGNED)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _entry(self, row: ObjectMeta, now: datetime | None) -> Entry:
        return Entry(row["path"].removeprefix(self._prefix), row["size"], age_s(row["last_modified"], now))
