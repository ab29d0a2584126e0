"""The actions that succeeded in this process: they distinguish a temporary refusal from a lasting one.

Credentials expire and are renewed, metadata services have outages, policies are edited; a producer must survive that
like an outage. At the start, however, a 403 is a mistake to be reported at once (and without the right to list, S3
answers 403 for an absent object). So the past decides: a verb that succeeded under a prefix is allowed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stepfs.store.s3.errors import is_expired, is_forbidden, is_skewed

_DEPTH: Final = 2  # <lake id>/log, <lake id>/data, …: policies do not go deeper


class Rights:
    """Verbs that succeeded, by prefix. Thread-safe: a set that only grows."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, str]] = set()

    def prove(self, verb: str, keys: Iterable[str]) -> None:
        """Record that `verb` was allowed on these keys."""
        self._proven.update((verb, _prefix(key)) for key in keys)

    def passing(self, error: Exception, verb: str, key: str) -> bool:
        """Whether `error` denies an action that was allowed before. Expired credentials deny every action.

        Not for a wrong clock: it does not correct itself.
        """
        if is_expired(error):
            return bool(self._proven)
        return is_forbidden(error) and not is_skewed(error) and (verb, _prefix(key)) in self._proven


def _prefix(key: str) -> str:
    return "/".join(key.split("/")[:-1][:_DEPTH])
