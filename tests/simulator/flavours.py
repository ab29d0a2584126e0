"""What a scenario may lean towards: races whose windows are so narrow that evenly drawn ones meet them once in hundreds."""

from __future__ import annotations

import enum
import random
from dataclasses import replace

from scenario import Life, NodePlan, ProducerPlan, ReclaimerPlan, Scenario, TrainerPlan, WatchedPlan, WatcherPlan

_DOZE_S = 20.0


class Flavour(enum.Enum):
    """The leanings."""

    USUAL = "usual"
    RUSH = "rush"  # starved reclaimers run all the time, and trainers want back what is just going
    # Readers start again and again and doze off on the way, and so do producers at their creates, or get no answer to them.
    SLEEPERS = "sleepers"
    WRITERS = "writers"  # of one group, many, each dozing off while the others go on
    LATE = "late"  # a trainer is killed again and again, and its changes land while the next life makes its own


def lean(plan: Scenario, flavour: Flavour, rng: random.Random) -> Scenario:
    """`plan` with what makes its flavour."""
    match flavour:
        case Flavour.USUAL:
            return plan
        case Flavour.RUSH:
            return replace(
                plan,
                producers=tuple(replace(producer, max_lead=None) for producer in plan.producers),
                trainers=tuple(replace(trainer, behind=0.5) for trainer in plan.trainers),
                reclaimers=tuple(
                    replace(one, every_s=0.05, lives=(*one.lives, Life(stalls=0.1))) for one in plan.reclaimers
                ),
            )
        case Flavour.SLEEPERS:
            return _sleepers(plan, rng)
        case Flavour.WRITERS:
            return _writers(plan, rng)
        case Flavour.LATE:
            return _late(plan, rng)


def _sleepers(plan: Scenario, rng: random.Random) -> Scenario:
    """Every commit makes a snapshot, is consumed and reclaimed soon. A producer that wakes takes a slot that is gone; a
    reader that wakes finds it in its LIST, right after the snapshot it began with.
    """
    cut_off = random.Random(f"cut off/{plan.seed}").random() < 0.3
    at_create = Life(stalls=0.35, stall_s=_DOZE_S, stalls_before=("create", "/log/"), cut_off=cut_off)
    at_list = Life(
        stalls=0.8, stall_s=_DOZE_S, stalls_before=("list", "/log/"), kill_at=30, restart_s=rng.choice((0.1, 1.0)),
    )  # fmt: skip
    return replace(
        plan, versions_max=1, faults={}, lying=False, rots=(), forks=(), watched=(), seal=False,
        producers=tuple(_steady(f"p{n}", at_create, rng) for n in range(5)),
        trainers=(TrainerPlan("g0", 1, 1, 0.0, 0.0, begins_s=0.0, step_s=0.0, one_by_one=False, lives=()),),
        reclaimers=(ReclaimerPlan("r0", every_s=rng.choice((3.0, 8.0)), lives=()),),
        watchers=tuple(WatcherPlan(f"w{n}", 2.0 * n, (at_list,) * 4) for n in range(6)),
    )  # fmt: skip


def _steady(name: str, life: Life, rng: random.Random) -> ProducerPlan:
    gap_s = rng.choice((0.5, 2.0))
    return ProducerPlan(name, rng.randint(4, 8), gap_s, 0.1, retire=False, begins_s=0.0, lives=(life,))


def _writers(plan: Scenario, rng: random.Random) -> Scenario:
    doze = Life(stalls=0.05, stall_s=3.0)
    runs = []
    for number in range(4):
        node = NodePlan(f"g{number}n0", 0.0, rng.choice((0.1, 0.3)), lives=(doze,))
        keep, rollback, step_s = rng.randint(1, 3), rng.choice((0.0, 0.2)), rng.choice((0.2, 0.5))
        runs.append(WatchedPlan(f"g{number}", 1, keep, rollback, step_s, node, lives=()))
    return replace(plan, trainers=(), watched=tuple(runs))


def _late(plan: Scenario, rng: random.Random) -> Scenario:
    """A run is ended and begun again, and killed in between: what was sent lands while its next life registers. Another
    run goes on, so that nothing but the first one's promise keeps the steps.
    """
    lives = tuple(Life(killed_sending=("create", "/control/", rng.choice((1, 2, 3))), restart_s=0.0) for _ in range(10))
    dies = TrainerPlan("g0", 2, 1, 0.0, 0.0, 0.0, 1.0, one_by_one=True, lives=lives, retires=0.7)
    lives_on = TrainerPlan("g1", 4, 1, 0.0, 0.0, 0.0, 1.0, one_by_one=True, lives=())
    return replace(
        plan, faults={}, lying=False, rots=(), forks=(), watched=(), watchers=(), followers=(), seal=False,
        producers=tuple(_steady(f"p{n}", Life(), rng) for n in range(2)), trainers=(dies, lives_on),
        reclaimers=(ReclaimerPlan("r0", every_s=0.3, lives=()),),
    )  # fmt: skip
