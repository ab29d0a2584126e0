"""The actions that succeeded in this process: they distinguish a temporary refusal from a lasting one.

Credentials expire and are renewed, metadata services have outages, policies are edited; a producer must survive that
like an outage. At the start, however, a refusal is a mistake to be reported at once (and without the right to list,
S3 refuses to read an absent object). So the past decides: a verb that succeeded under a prefix is allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

_DEPTH: Final = 2  # <lake id>/log, <lake id>/data, …: policies do not go deeper


class Rights:
    """Verbs that succeeded, by prefix. Thread-safe: a set that only grows.

    `is_expired`: the credentials have expired, which denies every action; `is_forbidden`: this action is denied, and
    may be allowed again (not for a wrong clock, which does not correct itself).
    """

    def __init__(
        self, *, is_expired: Callable[[Exception], bool], is_forbidden: Callable[[Exception], bool]
    ) -> None:
        self._is_expired = is_expired
        self._is_forbidden = is_forbidden
        self._proven: set[tuple[str, str]] = set()

    def prove(self, verb: str, keys: Iterable[str]) -> None:
        """Record that `verb` was allowed on these keys."""
        self._proven.update((verb, _prefix(key)) for key in keys)

    def passing(self, error: Exception, verb: str, key: str) -> bool:
        """Whether `error` denies an action that was allowed before."""
        if self._is_expired(error):
            return bool(self._proven)
        return self._is_forbidden(error) and (verb, _prefix(key)) in self._proven


def _prefix(key: str) -> str:
    return "/".join(key.split("/")[:-1][:_DEPTH])
