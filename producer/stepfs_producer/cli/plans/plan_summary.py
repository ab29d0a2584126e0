"""What people see of a running plan: a bar on a terminal, and the totals at its end as a line or a JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from stepfs.cli.columns import printable
from stepfs.format.ids import JSON_SCHEMA
from stepfs_producer.run.conductor import EndReason
from stepfs_producer.run.totals import BAD_SHOWN, PlanTotals


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """One run, ended."""

    lake: str
    lake_id: str
    producer_id: str
    plan: str
    totals: PlanTotals
    ending: EndReason
    reason: str
    seconds: float
    sealed: bool
    skip_log: str | None  # its object in the lake

    def as_line(self) -> str:
        totals = self.totals
        ended = {
            EndReason.COMPLETE: self.reason,
            EndReason.LIMIT: "the limit is reached",
            EndReason.STOPPED: "stopped; run the same command again to continue",
        }[self.ending]
        sealed = "; the lake is sealed" if self.sealed else ""
        if not totals.steps:
            return f"{self.producer_id}: no further step; {totals.state.step} steps in total; {ended}{sealed}"
        measures = totals.measures()
        shares = ", ".join(
            f"{printable(name)} {one['share']:.2%}"
            + (f" ({one['skipped']} records skipped)" if one["skipped"] else "")
            for name, one in totals.sources().items()
        )
        return (
            f"{self.producer_id}: {totals.steps} steps in {self.seconds:.1f} s, all committed; {totals.state.step} steps in "
            f"total; {totals.tokens} tokens ({shares}), fill {measures['fill']:.4f}, slowest ÷ mean rank "
            f"{measures['slowest_to_mean']:.4f}; {ended}{sealed}"
        )

    def as_json(self) -> str:
        totals = self.totals
        return json.dumps(
            {
                "schema": JSON_SCHEMA,
                "lake": self.lake,
                "lake_id": self.lake_id,
                "producer": self.producer_id,
                "plan": self.plan,
                "ending": str(self.ending),
                "reason": self.reason,
                "sealed": self.sealed,
                "seconds": round(self.seconds, 3),
                "run": {"steps": totals.steps, "tokens": totals.tokens},
                "total": {"steps": totals.state.step, "tokens": totals.state.tokens},
                "sources": totals.sources(),
                **totals.measures(),
                "skip_log": self.skip_log,
                "bad_records": [
                    {"source": one.source, "file": one.file, "offset": one.offset, "reason": one.reason}
                    for one in totals.bad[:BAD_SHOWN]
                ],
            }
        )


Show = Callable[[PlanTotals, Mapping[str, int]], None]


@contextmanager
def showing_plan(name: str, steps_max: int | None) -> Iterator[Show]:
    """A callable (totals, tokens held ahead by source) that keeps the bar current; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda _totals, _held: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[line]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=steps_max, line="")

        def show(totals: PlanTotals, held: Mapping[str, int]) -> None:
            measures = totals.measures()
            low = sorted(held, key=lambda one: held[one])[:3]
            line = (
                f"{totals.state.step} steps  {_short(totals.tokens)} tokens  fill {measures['fill']:.3f}  "
                f"slowest/mean {measures['slowest_to_mean']:.3f}  plan {measures['planning_ms']:.0f} ms  ahead: "
                + " ".join(f"{one} {_short(held[one])}" for one in low)
            )
            progress.update(task, completed=totals.state.step, line=line)

        yield show


def _short(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
