"""`stepfs stats`: steps, bytes, records and rates of a lake, by producer and hour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import typer

from stepfs import interruption
from stepfs.cli.columns import json_text, printable, size_text, table, time_text
from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory
from stepfs.cli.target import lake_of, opened_log
from stepfs.store.options import StoreOptions

if TYPE_CHECKING:
    from stepfs.format.snapshot import StepEntry
    from stepfs.lake.log.reader import LogReader

HOUR_MS: Final = 3_600_000
_HOURS_SHOWN: Final = 24


@dataclass(slots=True)
class Sums:
    """Of some steps. Times are of commits, by their producers' clocks."""

    steps: int = 0
    payload_bytes: int = 0
    records: int = 0
    first_ms: int = 0
    last_ms: int = 0

    def add(self, entry: StepEntry) -> None:
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
        rate = self.bytes_per_s
        return {
            **self.amounts(),
            "first_time": self.first_ms / 1000 if self.steps else None,
            "last_time": self.last_ms / 1000 if self.steps else None,
            "bytes_per_s": None if rate is None else round(rate, 3),
        }

    def amounts(self) -> dict[str, int]:
        return {"steps": self.steps, "bytes": self.payload_bytes, "records": self.records}


@dataclass(slots=True)
class LakeStats:
    """All live steps; by producer; and by hour (since 1970) and producer."""

    whole: Sums = field(default_factory=Sums)
    producers: dict[str, Sums] = field(default_factory=dict)
    hours: dict[tuple[int, str], Sums] = field(default_factory=dict)

    def add(self, entry: StepEntry) -> None:
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


def stats(
    target: LakeOrDirectory,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show what was committed: steps, bytes, records and rates, by producer and by hour.

    Of the steps that are live; the totals of all steps ever committed stand beside them. Reads the index alone.
    """
    found, facts = interruption.run(_counted, *lake_of(target, StoreOptions(endpoint_url)))
    typer.echo(json_text(_document(found, facts)) if as_json else "\n".join(_lines(found, facts)))


async def _counted(lake: str, store_options: StoreOptions) -> tuple[LakeStats, dict[str, Any]]:
    from stepfs.errors import ReclaimedError
    from stepfs.format.ids import Step

    found = LakeStats()
    async with opened_log(lake, store_options, reads_only=True) as log:
        number = log.first_live_step
        while number < log.state.next_step:
            try:
                found.add(await log.entry(number))
            except ReclaimedError:  # meanwhile: go on where the lake begins now
                await log.confirm()
                number = max(log.first_live_step, Step(number + 1))
            else:
                number = Step(number + 1)
        return found, _facts(lake, log)


def _facts(lake: str, log: LogReader) -> dict[str, Any]:
    return {
        "lake": lake,
        "lake_id": log.identity.lake_id,
        "first_step": log.first_live_step,
        "next_step": log.state.next_step,
        "total_bytes": log.state.total_bytes,
        "total_records": log.state.total_records,
    }


def _document(found: LakeStats, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **facts,
        **found.whole.document(),
        "producers": {name: sums.document() for name, sums in sorted(found.producers.items())},
        "hours": [
            {"time": hour * HOUR_MS // 1000, "producer": name, **sums.amounts()}
            for (hour, name), sums in sorted(found.hours.items())
        ],
    }


def _lines(found: LakeStats, facts: dict[str, Any]) -> Iterator[str]:
    live, ever = found.whole, facts["next_step"]
    yield f"live      {live.steps} steps, {size_text(live.payload_bytes)}, {live.records} records"
    yield f"in all    {ever} steps, {size_text(facts['total_bytes'])}, {facts['total_records']} records"
    if not live.steps:
        return
    yield ""
    rows = [
        [
            printable(name),
            *_amounts(sums),
            time_text(sums.first_ms),
            time_text(sums.last_ms),
            _rate(sums.bytes_per_s),
        ]
        for name, sums in sorted(found.producers.items())
    ]
    yield from table(["PRODUCER", "STEPS", "BYTES", "RECORDS", "FIRST COMMIT", "LAST COMMIT", "RATE"], rows)
    yield ""
    hours = list(found.by_hour().items())[-_HOURS_SHOWN:]
    hour_rows = [
        [time_text(hour * HOUR_MS), *_amounts(sums), _rate(sums.payload_bytes * 1000 / HOUR_MS)] for hour, sums in hours
    ]
    yield from table(["HOUR FROM", "STEPS", "BYTES", "RECORDS", "RATE"], hour_rows)


def _amounts(sums: Sums) -> list[str]:
    return [str(sums.steps), size_text(sums.payload_bytes), str(sums.records)]


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{size_text(int(bytes_per_s))}/s"
