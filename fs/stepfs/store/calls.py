"""Calls of a server's store: threads, silence, and ages by the clock of the store.

Threads have three budgets, so that the log and the floor never wait for bytes: creates, other control requests, data.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Final, TypeVar

import trio

from stepfs.errors import StepfsError
from stepfs.store.server_answers import MAY_COME_LATE, Answer, Verdict, explain, not_yet
from stepfs.store.settings import COMMIT_THREADS_MAX, CONTROL_THREADS_MAX, DATA_THREADS_MAX, StoreTexts
from stepfs.store.silence import Silence, unwatched

_RESOLUTION_S: Final = 1.0

T = TypeVar("T")
_DEPTH: Final = 2  # <lake id>/log, <lake id>/data, …: policies do not go deeper


def http_date(said: str | None) -> datetime | None:
    """A Date header; None if there is none that can be read."""
    try:
        when = parsedate_to_datetime(said or "")
    except (TypeError, ValueError):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def age_s(modified: datetime | None, now: datetime | None) -> float:
    """The least age; 0 where either time is unknown."""
    if now is None or modified is None:
        return 0.0
    return max(0.0, (now - modified).total_seconds() - _RESOLUTION_S)


class Calls:
    """Runs the calls of the store `url`; `data_threads`: how many at a time move bodies."""

    def __init__(self, url: str, words: StoreTexts, data_threads: int | None, silence: Silence | None) -> None:
        self.rights = Rights()
        self.data_threads = trio.CapacityLimiter(data_threads or DATA_THREADS_MAX)
        self._control_threads = trio.CapacityLimiter(CONTROL_THREADS_MAX)
        self._commit_threads = trio.CapacityLimiter(COMMIT_THREADS_MAX)
        self._url = url
        self.words = words
        self._silence = silence or unwatched()
        self.sign_of_life = self._silence.note_sign_of_life

    async def run(self, verb: str, work: Callable[[], T], *, data: bool = False, abandon: bool = True) -> T:
        """Run `work` in a thread. `data`: it moves a body of any size. `abandon`: a cancelled caller leaves it at once."""
        control = self._commit_threads if verb == "create" else self._control_threads
        limiter = self.data_threads if data else control
        run = partial(trio.to_thread.run_sync, work, limiter=limiter, abandon_on_cancel=abandon)
        return await self._silence.watch(self._url, run, self.words.check_network)

    def explained(self, answer: Answer, verb: str, key: str, doing: str = "", *, late: bool = False) -> StepfsError:
        """The error for the caller whose `verb` failed on `key`. `late`: credentials, and the right time, may come yet."""
        passing, doing = self.rights.passing(answer.verdict, verb, key), f"{doing or verb} {key or 'the lake'}"
        if late and not passing and answer.verdict in MAY_COME_LATE:
            return not_yet(answer, self._url, doing)
        return explain(answer, self._url, doing, self.words, passing=passing)


class Rights:
    """Verbs that succeeded in this process, by prefix: they distinguish a temporary refusal from a lasting one.

    Credentials expire and are renewed, metadata services have outages, policies are edited; a producer must survive that
    like an outage. At the start, however, a refusal is a mistake to be reported at once (and without the right to list,
    S3 refuses to read an absent object). So the past decides: a verb that succeeded under a prefix is allowed there.
    Thread-safe: a set that only grows.
    """

    def __init__(self) -> None:
        self._proven: set[tuple[str, str]] = set()

    def prove(self, verb: str, keys: Iterable[str]) -> None:
        self._proven.update((verb, _prefix(key)) for key in keys)

    def passing(self, verdict: Verdict, verb: str, key: str) -> bool:
        """Whether the verdict denies an action that was allowed before; expired credentials deny every action."""
        if verdict is Verdict.EXPIRED:
            return bool(self._proven)
        return verdict is Verdict.FORBIDDEN and (verb, _prefix(key)) in self._proven


def _prefix(key: str) -> str:
    return "/".join(key.split("/")[:-1][:_DEPTH])
