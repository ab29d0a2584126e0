"""Requests to one place, in threads: each attempt is one of ours, counted, with the answer that its error tells."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import trio
from obstore.exceptions import BaseError

from stepfs import entropy
from stepfs.store.answers import PASSING, Answer, Verdict
from stepfs.store.api import Counts
from stepfs.store.calls import Calls
from stepfs.store.cloud.answers import read_answer, unusable
from stepfs.store.cloud.place import Place

if TYPE_CHECKING:
    from stepfs.store.cloud.place import Client

T = TypeVar("T")
_ATTEMPTS_MAX: Final = 4
_RETRIED: Final = PASSING | {Verdict.CONFLICT}
_PAUSE_S: Final = 0.25  # at most, before the second attempt


class Timeouts(NamedTuple):
    """Seconds without a byte; `upload`: for a whole body, since obstore's time begins with the request."""

    commit: float = 15.0
    data: float = 20.0
    upload: float = 120.0


TIMEOUTS: Final = Timeouts()


class RequestError(Exception):
    """A request failed; `answer` says how."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.said)
        self.answer = answer


class Requests:
    """Of one store. Requests of a verb share a client with that verb's timeout."""

    def __init__(
        self,
        place: Place,
        counts: Counts,
        timeouts: Timeouts,
        calls: Calls,
    ) -> None:
        self._place = place
        self._counts = counts
        self._calls = calls
        self._timeouts_s = {"create": timeouts.commit, "put": timeouts.upload}
        self._data_timeout_s = timeouts.data
        self._clients: dict[tuple[float, int], Client] = {}
        self._making = threading.Lock()

    async def call(
        self,
        verb: str,
        keys: tuple[str, ...],
        work: Callable[[Client], T],
        *,
        data: bool = False,
        retries: int = 0,
    ) -> T:
        """Run `work` in a thread, again while its failures pass; a create once, and to its end.

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

        once = verb == "create"
        for number in range(_ATTEMPTS_MAX):
            try:
                result = await self._calls.run(verb, attempt, data=data, abandon=not once)
            except RequestError as error:
                if once or error.answer.verdict not in _RETRIED or number == _ATTEMPTS_MAX - 1:
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
        self._counts.add(throttled=answer.verdict is Verdict.THROTTLED)
        return RequestError(answer)

    def close(self) -> None:
        self._clients.clear()
