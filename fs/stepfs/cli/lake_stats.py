"""Sums over the live steps of a lake, by producer and by hour of their commits: pure functions of index entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stepfs.format.snapshot import StepEntry

HOUR_MS: Final = 3_600_000


@dataclass(slots=True)
class Sums:
    """Of some steps. Times are of commits, by their producers' clocks."""

    steps: int = 0
    payload_bytes: int = 0
    records: int = 0
    first_ms: int = 0
    last_ms: int = 0

    def add(self, entry: StepEntry) -> None:
        """One more step."""
        self.first_ms = min(self.first_ms, entry.time_ms) if self.steps else entry.time_ms
        self.last_ms = max(self.last_ms, entry.time_ms)
        self.steps += 1
        self.payload_bytes += entry.tgb.payload_bytes
        self.records += entry.tgb.records

    @property
    def bytes_per_s(self) -> float | None:
        """Between the first commit and the last; None for less than two moments."""
        span_ms = self.last_ms - self.first_ms
        return self.payload_bytes * 1000 / span_ms if span_ms else None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        rate = self.bytes_per_s
        return {
            **self.amounts(),
            "first_time": self.first_ms / 1000 if self.steps else None,
            "last_time": self.last_ms / 1000 if self.steps else None,
            "bytes_per_s": None if rate is None else round(rate, 3),
        }

    def amounts(self) -> dict[str, int]:
        """Without times."""
        return {"steps": self.steps, "bytes": self.payload_bytes, "records": self.records}


@dataclass(slots=True)
class LakeStats:
    """All live steps; by producer; and by hour (since 1970) and producer."""

    whole: Sums = field(default_factory=Sums)
    producers: dict[str, Sums] = field(default_factory=dict)
    hours: dict[tuple[int, str], Sums] = field(default_factory=dict)

    def add(self, entry: StepEntry) -> None:
        """One more step."""
        name, hour = entry.producer_id, entry.time_ms // HOUR_MS
        self.whole.add(entry)
        self.producers.setdefault(name, Sums()).add(entry)
        self.hours.setdefault((hour, name), Sums()).add(entry)

    def by_hour(self) -> dict[int, Sums]:
        """All producers together; in order."""
        found: dict[int, Sums] = {}
        for (hour, _), sums in sorted(self.hours.items()):
            total = found.setdefault(hour, Sums())
            total.steps += sums.steps
            total.payload_bytes += sums.payload_bytes
            total.records += sums.records
        return found
