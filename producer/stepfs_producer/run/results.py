"""Results of a run or a simulation: shares, fill, balance, losses, and the JSON documents that commands print of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.format.ids import JSON_SCHEMA
from stepfs_producer.plan.mix import ONE
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.step import End, State, StepPlan, read_position
from stepfs_producer.run.bottleneck import Bottleneck
from stepfs_producer.run.pipeline import EndReason, RunCallbacks
from stepfs_producer.run.prepare import PreparedPlan

_BAD_LINES: Final = 10
_BAD_KEPT: Final = 1000


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be decoded."""

    source: str
    file: str
    record: int  # where it begins
    reason: str


@dataclass(slots=True)
class PlanTotals:
    """Measures of the steps of this run, summed as they are appended."""

    start: State
    state: State
    steps: int = 0
    room: int = 0
    tokens: int = 0
    cut: int = 0
    lost: int = 0
    # Sums over steps of slowest ÷ mean rank, and the same where ranks meet at every micro-batch; of the cost "", and by load.
    slowest: dict[str, tuple[float, float]] = field(default_factory=lambda: {"": (0.0, 0.0)})
    planning_s: float = 0.0
    wanted: dict[str, float] = field(default_factory=dict)  # tokens by schedule
    bad: list[BadRecord] = field(default_factory=list)
    behind: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # records behind the last samples: dropped, excluded
    loaded: dict[str, tuple[int, int]] = field(default_factory=dict)  # tokens by source, those that the loss looks at
    pace: Callable[[], str] = str  # for people: the bottleneck, and the steps that the slowest group still needs

    def note(self, plan: StepPlan, planning_s: float) -> None:
        self.steps += 1
        self.state = plan.after
        self.room += plan.room
        self.tokens += plan.tokens
        self.cut += plan.cut
        self.lost += sum(plan.lost.values())
        self.planning_s += planning_s
        for name, costs in {"": plan.costs, **plan.loads}.items():
            (before, before_micro), (whole, micro) = self.slowest.get(name, (0.0, 0.0)), slowest_to_mean(costs)
            self.slowest[name] = before + whole, before_micro + micro
        for name, share in zip(plan.sources, plan.shares, strict=True):
            self.wanted[name] = self.wanted.get(name, 0.0) + plan.tokens * share / ONE

    def bad_lines(self) -> list[str]:
        return [f"source {bad.source}, {bad.file} at {bad.record}: {bad.reason}" for bad in self.bad[:_BAD_LINES]]

    def note_bad(self, record: BadRecord) -> None:
        if len(self.bad) < _BAD_KEPT:
            self.bad.append(record)

    def note_loaded(self, source: str, tokens: int, learned: int) -> None:
        before, learned_before = self.loaded.get(source, (0, 0))
        self.loaded[source] = before + tokens, learned_before + learned

    def sources(self) -> dict[str, dict[str, Any]]:
        """Per source: tokens, share given and wanted, records and skipped records of this run; the share of the tokens loaded
        that the loss looks at.
        """
        found = {}
        for name, after in sorted(self.state.sources.items()):
            dropped, excluded = self.behind.get(name, (0, 0))
            before, (loaded, learned) = self.start.sources.get(name), self.loaded.get(name, (0, 0))
            tokens = after.tokens - (before.tokens if before else 0)
            found[name] = {
                "tokens": tokens,
                "share": round(tokens / self.tokens, 6) if self.tokens else 0.0,
                "wanted": round(self.wanted.get(name, 0.0) / self.tokens, 6) if self.tokens else 0.0,
                "records": after.records - (before.records if before else 0),
                "skipped": after.skipped - (before.skipped if before else 0),
                "dropped": after.dropped - (before.dropped if before else 0) + dropped,
                "excluded": after.excluded - (before.excluded if before else 0) + excluded,
                "plain": after.plain - (before.plain if before else 0),
                "learned": round(learned / loaded, 6) if loaded else None,
                "epoch": after.epoch,
            }
        return found

    def measures(self) -> dict[str, Any]:
        """The figures that `simulate` prints too."""
        steps = max(self.steps, 1)
        names = ("slowest_to_mean", "slowest_to_mean_micro")
        slowest = {
            load: {name: round(one / steps, 6) for name, one in zip(names, both, strict=True)}
            for load, both in self.slowest.items()
        }
        of_cost = slowest.pop("")
        return {
            "fill": round(self.tokens / self.room, 6) if self.room else 0.0,
            **of_cost,
            **({"loads": slowest} if slowest else {}),
            "padding_tokens": self.room - self.tokens,
            "cut_documents": self.cut,
            "lost_tokens": self.lost,
            "planning_ms": round(1000 * self.planning_s / steps, 3),
        }


def slowest_to_mean(costs: NDArray[np.int64]) -> tuple[float, float]:
    """Slowest ÷ mean rank of [ranks, micro-batches]: where ranks meet once, and where they meet at every micro-batch.

    1 of a load that a step has nowhere.
    """
    total = int(costs.sum())
    if not total:
        return 1.0, 1.0
    whole, micro = int(costs.sum(axis=1).max()), int(costs.max(axis=0).sum())
    return whole * len(costs) / total, micro * len(costs) / total


def totals_from(position: object, rules: Rules) -> PlanTotals:
    """The totals of a run that begins at a committed position; None: at the beginning."""
    state = Planner(rules).begin(None if position is None else read_position(position))
    return PlanTotals(state, state)


Show = Callable[[PlanTotals, Mapping[str, int]], None]  # with the tokens held ahead by source
Progress = Callable[[str, int | None], AbstractContextManager[Show]]  # of a producer id and its steps at most


def show_nothing(_name: str, _steps_max: int | None) -> AbstractContextManager[Show]:
    """A `Progress` for programs."""
    return nullcontext(lambda _totals, _held: None)


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run, ended."""

    lake: str
    lake_id: str
    producer_id: str
    plan: str  # digest
    totals: PlanTotals
    ending: EndReason
    reason: str
    bottleneck: Bottleneck | None
    seconds: float
    sealed: bool

    def document(self) -> dict[str, Any]:
        """The document that `stepfs-produce run --json` prints (fs/JSON.md)."""
        totals = self.totals
        return {
            "schema": JSON_SCHEMA,
            "lake": self.lake,
            "lake_id": self.lake_id,
            "producer": self.producer_id,
            "plan": self.plan,
            "ending": str(self.ending),
            "reason": self.reason,
            "bottleneck": None if self.bottleneck is None else self.bottleneck.document(),
            "sealed": self.sealed,
            "seconds": round(self.seconds, 3),
            "run": {"steps": totals.steps, "tokens": totals.tokens},
            "total": {"steps": totals.state.step, "tokens": totals.state.tokens},
            **_measures(totals),
        }


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The first steps of a plan, planned."""

    plan: str  # digest
    totals: PlanTotals
    reason: str
    seconds: float

    def document(self) -> dict[str, Any]:
        """The document that `stepfs-produce simulate --json` prints (fs/JSON.md)."""
        return {
            "schema": JSON_SCHEMA,
            "plan": self.plan,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "steps": self.totals.steps,
            "tokens": self.totals.tokens,
            **_measures(self.totals),
        }


def _measures(totals: PlanTotals) -> Mapping[str, Any]:
    return {
        "sources": totals.sources(),
        **totals.measures(),
        "bad_records": [asdict(one) for one in totals.bad],
    }


@contextmanager
def bad_records_named(totals: PlanTotals, say: Callable[[str], None]) -> Iterator[None]:
    """An error comes behind the bad records that were met: one may be its reason."""
    try:
        yield
    except Exception:
        for line in totals.bad_lines():
            say(f"bad record: {line}")
        raise


def callbacks_of(prepared: PreparedPlan, totals: PlanTotals, show: Show) -> RunCallbacks:
    def skipped(source: str, file: int, offset: int, reason: str) -> None:
        totals.note_bad(BadRecord(source, prepared.listings[source].files[file].name, offset, reason))

    def planned(plan: StepPlan, planning_s: float, held: Mapping[str, int]) -> None:
        totals.note(plan, planning_s)
        show(totals, held)

    def ended(end: End) -> None:
        totals.behind = end.behind

    return RunCallbacks(skipped, planned, totals.note_loaded, ended)
