"""The skip log of a run: the records that it could not decode, kept beside the plan while the run goes on.

The position counts skipped records; this names the first ten thousand that an incarnation met. It may name records that
were met ahead of the last committed step; the next run meets them again.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Final

import trio

from stepfs.errors import StoreUnreachableError
from stepfs.store.api import Store
from stepfs_producer.run.results import PlanTotals

_log = logging.getLogger("stepfs.producer")

_EVERY_S: Final = 60.0


class SkipLog:
    """One object of one incarnation, written again when there are more records."""

    def __init__(self, store: Store, key: str, totals: PlanTotals) -> None:
        self.key = key
        self.store = store
        self._totals = totals
        self._written = 0

    async def run(self) -> None:
        """Write new records once a minute, for ever."""
        while True:
            await trio.sleep(_EVERY_S)
            await self.write()

    async def write(self) -> str | None:
        """Write the log if it lacks records. Its key, or None if there is nothing to log."""
        bad = self._totals.bad
        if len(bad) > self._written:
            lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in bad)
            count = len(bad)
            try:
                await self.store.put(self.key, [lines.encode("utf-8", "replace")])
            except StoreUnreachableError as error:
                _log.info("the skip log waits: %s", error)
            else:
                self._written = count
        return self.key if self._written else None
