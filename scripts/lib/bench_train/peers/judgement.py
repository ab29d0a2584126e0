"""Results of a peer's runs, from their journals: its pace, its stalls, and whether a resume lost or repeated anything. Pure.

"Exact" is: what was trained up to the last saved state, and what came after the resume, are together every sample once,
in the order of the undisturbed run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Journal:
    """One run of the driver. Times in seconds; `at` since the call that opens the data."""

    imported_s: float  # since the process started
    at: tuple[float, ...]
    waits: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    cpu_s: float | None  # after the imports; None if the run did not end by itself
    stopped: bool = False  # before the end of the epoch: it took too long

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Journal:
        """A line that a kill cut short is not a batch."""
        facts = [json.loads(line) for line in lines if line.endswith("}\n")]
        batches = [fact for fact in facts if "ids" in fact]
        imported = next((fact for fact in facts if "imported_s" in fact), {"imported_s": float("nan"), "cpu_s": 0.0})
        ended = next((fact for fact in facts if "ended" in fact), None)
        return cls(
            imported["imported_s"],
            tuple(fact["at"] for fact in batches),
            tuple(fact["wait"] for fact in batches),
            tuple(tuple(fact["ids"]) for fact in batches),
            None if ended is None else ended["cpu_s"] - imported["cpu_s"],
            ended is not None and ended["stopped"],
        )

    def samples(self, batches: int | None = None) -> list[int]:
        """Ids of the first `batches` batches, else of all."""
        return [number for ids in self.ids[:batches] for number in ids]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast samples came after the beginning, and which share of that time the loop waited."""

    samples_per_s: float
    stall: float
    first_s: float


def pace(journal: Journal, *, beginning: int) -> Pace:
    """The first `beginning` batches (half of the batches at most) are not counted: `first_s` is the cost of a start."""
    count = len(journal.at)
    if count < 2:
        return Pace(float("nan"), float("nan"), journal.at[0] if count else float("nan"))
    start = min(beginning, count // 2)
    start = max(1, start)
    span_s = journal.at[-1] - journal.at[start - 1]
    samples = sum(len(ids) for ids in journal.ids[start:])
    return Pace(samples / span_s, sum(journal.waits[start:]) / span_s, journal.at[0])


@dataclass(frozen=True, slots=True)
class Resume:
    """Samples of the epoch that a resume lost or repeated."""

    lost: int
    repeated: int
    foreign: int = 0  # ids that the undisturbed run never had
    same_order: bool = True

    @property
    def exact(self) -> bool:
        return not (self.lost or self.repeated or self.foreign) and self.same_order

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        counts = {"lost": self.lost, "repeated": self.repeated, "foreign": self.foreign}
        wrong = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return wrong or "each once, other order"


EXACT = Resume(lost=0, repeated=0)


def resume(undisturbed: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Resume:
    """`before`: up to the last saved state; `after`: from the resume to the end of the epoch."""
    wanted, got = Counter(undisturbed), Counter([*before, *after])
    return Resume(
        lost=sum((wanted - got).values()),
        repeated=sum(count for number, count in (got - wanted).items() if number in wanted),
        foreign=sum(count for number, count in got.items() if number not in wanted),
        same_order=[*before, *after] == list(undisturbed),
    )


@dataclass
class Result:
    """The rows of one peer and kind. A figure that could not be measured stays None; `trouble` gives the reason."""

    peer: str
    kind: str
    ours: bool = False
    versions: str = ""
    samples_per_s: float | None = None
    stall: float | None = None
    bytes_per_sample: float | None = None
    cpu_s_per_1000: float | None = None
    pss_mib: float | None = None
    first_s: float | None = None
    resumed_by: str = ""
    resume: str = ""
    resume_exact: bool | None = None
    resume_s: float | None = None
    other_workers: str = ""
    other_workers_exact: bool | None = None
    trouble: str = ""
    details: dict[str, object] = field(default_factory=dict)
