"""The deletions of a run, real or only planned: both are counted at the same place, so that they cannot differ."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from stepfs.errors import StepfsError
from stepfs.format.ids import Step, Version
from stepfs.lake.reclaim.plan import Target
from stepfs.store.api import Entry, Store

_log = logging.getLogger("stepfs.lake.reclaim")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run; with `dry_run` the result that it would have."""

    floor: Version
    first_live_step: Step
    deleted_objects: int
    deleted_bytes: int
    reason: str


class CountingRemover:
    """Deletes from `store` and counts; with None it only counts."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self.objects = 0
        self.bytes = 0

    async def remove(self, entries: Sequence[Entry]) -> None:
        if self._store is not None and entries:
            await self._store.delete([entry.key for entry in entries])
        self.objects += len(entries)
        self.bytes += sum(entry.size for entry in entries)

    async def remove_if_allowed(self, entries: Sequence[Entry]) -> None:
        """Delete objects that may as well stay."""
        try:
            await self.remove(entries)
        except StepfsError as error:
            _log.info("%d objects that are no longer needed stay: %s", len(entries), error)

    def report(self, target: Target, reason: str) -> Report:
        return Report(target.floor, target.first_live, self.objects, self.bytes, reason)
