"""The options of a run beside its plan, and how its progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from stepfs.store.options import StoreOptions
from stepfs_producer.run.results import PlanTotals

Show = Callable[[PlanTotals, Mapping[str, int]], None]  # with the tokens held ahead by source
Progress = Callable[[str, int | None], AbstractContextManager[Show]]  # of a producer id and its steps at most


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, beside its plan."""

    lake: str
    producer_id: str = "plan"
    accept_changes: bool = False
    workers: int | None = None  # one per core
    memory_bytes: int | None = None
    max_lead: int | None = 1000
    limit_steps: int | None = None
    steps_per_second: float | None = None
    seal: bool = False
    fixed_shape: bool = False  # a new lake takes rows of this plan's shape alone
    store_options: StoreOptions = field(default_factory=StoreOptions)
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"


def show_nothing(_name: str, _steps_max: int | None) -> AbstractContextManager[Show]:
    """A `Progress` for programs."""
    return nullcontext(lambda _totals, _held: None)
