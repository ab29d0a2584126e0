"""The figures of a report: what steps are made of, how full and even they are, where a plan stands, what a lake will hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.balance import Over
from stepfs_producer.plan.mix import ONE, MixSchedule
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.run.results import slowest_to_mean
from stepfs_producer.run.view import Row

_MIX_POINTS: Final = 16  # at which the mix of several steps is taken
_SPAN_S_MIN: Final = 60.0  # of commits; a shorter one tells no pace
_RECENT: Final = 5  # the last fifth of what is known says at which pace a lake grows
DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Shares:
    """The tokens of some steps by source, and the shares that the mix wants there."""

    first: int
    next: int
    tokens: Mapping[str, int]
    wanted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepLook:
    """A step that was looked at: tokens ÷ room, and slowest ÷ mean rank by load."""

    step: int
    fill: float
    slowest: Mapping[str, float]


@dataclass(slots=True)
class SourceFigures:
    """One source over all steps of the plan until now; counts of records as `simulate` has them."""

    tokens: int = 0
    share: float = 0.0
    records: int = 0
    skipped: int = 0
    dropped: int = 0
    excluded: int = 0
    epoch: int = 0
    seen: int = 0  # tokens that were looked at
    learned: int = 0  # of these, that the loss looks at
    epochs_needed: float | None = None  # by the whole plan, estimated
    lengths: list[int] = field(default_factory=list)  # documents of 1, 2 to 3, 4 to 7, … tokens in a row
    reasons: list[str] = field(default_factory=list)  # of the first bad records

    def note_lengths(self, tokens: Integers) -> None:
        counts = np.bincount(np.frexp(tokens[tokens > 0])[1] - 1, minlength=len(self.lengths)).tolist()
        self.lengths = list(map(sum, zip_longest(self.lengths, counts, fillvalue=0)))


@dataclass(slots=True)
class Contents:
    """The contents of one plan's steps."""

    name: str  # of the producer; of a plan, its file
    plan: str  # digest
    step: int = 0  # where the plan stands
    steps: int | None = None  # it has at most; None: it does not say
    tokens: int = 0
    stages: list[dict[str, int]] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)
    looked: list[StepLook] = field(default_factory=list)
    sources: dict[str, SourceFigures] = field(default_factory=dict)

    def of(self, source: str) -> SourceFigures:
        return self.sources.setdefault(source, SourceFigures())


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """A commit that was read: what its producer and the lake had behind it."""

    time: float  # seconds since 1970, by the producer's clock
    producer: str
    producer_steps: int
    next_step: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """The growth of a lake if it goes on as lately and nothing is reclaimed. Times are seconds since 1970; None: not known."""

    steps_per_day: float
    bytes_per_day: float
    ends: float | None
    bytes_at_end: int | None
    free_bytes: int | None
    full: float | None


def stages_of(plan: Plan) -> list[dict[str, int]]:
    return [{"from": one.from_, "sequence_length": one.sequence_length} for one in resolve(plan).stages]


def wanted_shares(mix: MixSchedule, names: Sequence[str], steps: range) -> dict[str, float]:
    """The mean shares of the mix in these steps, by source."""
    at = spread(steps, _MIX_POINTS)
    sums = [sum(of_source) for of_source in zip(*(mix.shares(step) for step in at), strict=True)]
    return {name: one / ONE / len(at) for name, one in zip(names, sums, strict=True)}


def slowest_of(plan: Plan, costs: Mapping[str, Integers]) -> dict[str, float]:
    """Slowest ÷ mean rank by load, of [ranks, micro-batches], where the plan says that ranks meet."""
    level = 0 if plan.balance.over is Over.RANKS else 1
    return {name: slowest_to_mean(one)[level] for name, one in costs.items()}


def without_secrets(url: str) -> str:
    """The URL without user, password and query."""
    if "://" not in url or url.startswith("file:"):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def joined(shares: Sequence[Shares], most: int) -> list[Shares]:
    """The same in at most so many points, each of as many neighbours."""
    size = -(-len(shares) // most) or 1
    groups = [shares[at : at + size] for at in range(0, len(shares), size)]
    return [
        Shares(
            group[0].first,
            group[-1].next,
            {name: sum(one.tokens.get(name, 0) for one in group) for name in group[-1].tokens},
            {
                name: sum(one.wanted.get(name, 0.0) * (one.next - one.first) for one in group)
                / (group[-1].next - group[0].first)
                for name in group[-1].wanted
            },
        )
        for group in groups
    ]


def spread(steps: range, most: int) -> list[int]:
    """At most so many numbers of a range, first and last included, at equal distances."""
    if len(steps) <= most:
        return list(steps)
    return [steps[number * (len(steps) - 1) // (most - 1)] for number in range(most)] if most > 1 else [steps[-1]]


def forecast_of(
    points: Sequence[CommitPoint], now_s: float, steps_left: int | None, live_bytes: int, free_bytes: int | None
) -> Forecast | None:
    """None where commits do not show a pace, which is that until now: a lake that rests is full later. `points`: in order of
    steps; `free_bytes`: that the store still takes.
    """
    recent = points[-max(2, len(points) // _RECENT) :]
    if (
        len(recent) < 2
        or recent[-1].time <= recent[0].time
        or max(now_s, recent[-1].time) - recent[0].time < _SPAN_S_MIN
    ):
        return None
    begin, end = recent[0], recent[-1]
    span_s, steps, grown = (
        max(now_s, end.time) - begin.time,
        end.next_step - begin.next_step,
        end.total_bytes - begin.total_bytes,
    )
    ends = None if steps_left is None else now_s + steps_left * span_s / steps
    full = None if free_bytes is None or not grown else now_s + free_bytes * span_s / grown
    return Forecast(
        steps_per_day=DAY_S * steps / span_s,
        bytes_per_day=DAY_S * grown / span_s,
        ends=ends,
        bytes_at_end=None if steps_left is None else round(live_bytes + steps_left * grown / steps),
        free_bytes=free_bytes,
        full=None if full is None or (ends is not None and ends < full) else full,
    )


def between(points: Sequence[tuple[int, Mapping[str, int]]]) -> list[tuple[range, dict[str, int]]]:
    """The tokens by source of the steps between counts until then, which begin with nothing at step 0."""
    known: list[tuple[int, Mapping[str, int]]] = [(0, {}), *points]
    return [
        (range(before, after), {name: count - had.get(name, 0) for name, count in has.items()})
        for (before, had), (after, has) in pairwise(known)
        if before < after
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """A lake as its runs see it: the document of `stepfs status --json`, and commits of its live steps."""

    status: Mapping[str, Any]
    commits: Sequence[CommitPoint]
    forecast: Forecast | None


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of a plan or a lake."""

    what: str  # the plan's file, or the lake's URL
    time: float
    contents: Sequence[Contents]
    run: Run | None  # None: of a plan
    sample: str  # which steps the figures are of, in words
    notes: Sequence[str]  # what is not known, and why
    rows: Sequence[tuple[str, Row]] = ()  # a row and its place in words
    no_ids: str = ""  # why rows have ids in place of text

    def document(self) -> dict[str, Any]:
        """The document of `stepfs-produce report --json` (fs/JSON.md), without its number: the figures, and no row."""
        figures = asdict(replace(self, rows=()))
        what = {"plan": self.what if self.run is None else None, "lake": None if self.run is None else self.what}
        return what | {name: one for name, one in figures.items() if name not in {"what", "rows", "no_ids"}}
