"""The store's own clock: ages by the caller's are forbidden, and obstore does not pass an answer's Date on."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from stepfs.store.ages import http_date

_KEEP_S: Final = 600.0  # clocks drift, if slowly
_ASK_AGAIN_S: Final = 60.0  # a store that did not tell
_ANSWER_S: Final = 5.0


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
