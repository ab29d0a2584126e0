"""What a scenario is made of: who takes part, what breaks, who is killed when. Pure values; `draw` makes them of a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from damage import Rot
from doubles.faults import Fault


@dataclass(frozen=True, slots=True)
class Life:
    """One run of a process: undisturbed, starved, killed at its nth await, or frozen there (perhaps replaced meanwhile)."""

    kill_at: int | None = None
    freeze_at: int | None = None
    freeze_s: float = 0.0
    replaced: bool = False  # a successor starts while this one is frozen
    stalls: float = 0.0  # chance that an await takes so much longer:
    stall_s: float = 1.0
    stalls_before: tuple[str, str] | None = None  # only before requests of this verb for keys that contain this
    cut_off: bool = False  # in place of a stall: it gets no answer for so long, to that request and all others
    killed_sending: tuple[str, str, int] | None = None  # its nth request of this verb for such a key
    locked_out_s: tuple[float, float] | None = None  # from when to when after its start it has no credentials
    restart_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ProducerPlan:
    name: str
    total: int
    gap_s: float
    max_delay_s: float
    retire: bool
    begins_s: float
    lives: tuple[Life, ...]
    max_lead: int | None = None
    constructors: int = 0  # that upload its steps under tickets; 0: it appends
    lost: float = 0.0  # chance that one is not heard of any more, after its upload or before


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    name: str
    every: int  # steps between checkpoints
    keep: int
    rollback: float  # chance after each checkpoint of resuming from a kept one
    behind: float  # chance of trying to register an older checkpoint
    begins_s: float
    step_s: float
    one_by_one: bool  # as the hook and the command line do; else the whole set, as a mount does
    lives: tuple[Life, ...]
    retires: float = 0.0  # chance after each checkpoint that the run is ended and begun again under its name


@dataclass(frozen=True, slots=True)
class NodePlan:
    name: str
    lag_s: float  # how late its file system shows a change of the checkpoint directory
    poll_s: float
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class WatchedPlan:
    name: str
    every: int
    keep: int
    rollback: float
    step_s: float
    node: NodePlan
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class ForkPlan:
    name: str
    every: int
    step_s: float
    begins_s: float
    lives: tuple[Life, ...]
    again: bool = False  # the child is forked as well
    until_damage: bool = False


@dataclass(frozen=True, slots=True)
class FollowerPlan:
    name: str
    group: str
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class WatcherPlan:
    name: str
    begins_s: float
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class ReclaimerPlan:
    name: str
    every_s: float
    lives: tuple[Life, ...]
    grace_s: float = 0.0
    timer: bool = False  # a new process each time


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    name: str
    every_s: float
    every: int  # steps between checkpoints of the run there; 0: nobody reads it
    keeps_all: bool
    replicators: tuple[tuple[Life, ...], ...]  # the lives of each
    run: tuple[Life, ...]
    near: tuple[Life, ...] | None = None  # of a reader of the lake that asks the replica first


@dataclass(frozen=True, slots=True)
class RollBack:
    """The store is copied, and put back to that copy later while its server is stopped for so long."""

    copied_s: float
    lasts_s: float  # from the copy until it is put back
    away_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    slices: int
    segment_steps: int
    versions_max: int
    page: int | None  # keys that one LIST or DELETE takes
    faults: Mapping[Fault, float]
    lying: bool  # among them are some that break what COMMIT.md assumes of the store
    skewed: bool  # every process has a wall clock of its own
    rots: tuple[Rot, ...]
    producers: tuple[ProducerPlan, ...]
    trainers: tuple[TrainerPlan, ...]
    watched: tuple[WatchedPlan, ...]
    reclaimers: tuple[ReclaimerPlan, ...]
    forks: tuple[ForkPlan, ...]
    watchers: tuple[WatcherPlan, ...]
    seal: bool
    followers: tuple[FollowerPlan, ...] = ()
    replicas: tuple[ReplicaPlan, ...] = ()
    roll_back: RollBack | None = None
    far: Mapping[str, float] = field(default_factory=dict)  # process → how many times the usual latency
