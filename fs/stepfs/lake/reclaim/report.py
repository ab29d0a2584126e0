"""The deletions of a run, real or only planned: both are counted at the same place, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepfs.format.ids import Step, Version
from stepfs.lake.reclaim.plan import Target
from stepfs.store.api import Entry, Store


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

    def report(self, target: Target, reason: str) -> Report:
        return Report(target.floor, target.first_live, self.objects, self.bytes, reason)
