"""From a seed to everything that will go wrong: who takes part, what breaks, who is killed when. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from stepfs.store.faults import (
    CONFLICT_409,
    ERROR_500,
    ERROR_500_APPLIED,
    FALSE_412,
    LOST_REQUEST,
    LOST_RESPONSE,
    OWN_412,
    RESET_AFTER,
    RESET_BEFORE,
    SHORT_BODY,
    THROTTLED_503,
    Fault,
    Told,
    Weighted,
    delayed,
)

_KINDS: tuple[Fault, ...] = (
    LOST_REQUEST,
    LOST_RESPONSE,
    RESET_BEFORE,
    RESET_AFTER,
    ERROR_500,
    ERROR_500_APPLIED,
    THROTTLED_503,
    CONFLICT_409,
    FALSE_412,
    OWN_412,
    SHORT_BODY,
    delayed(0.05),
    delayed(3.0, wait_s=0.5),
    delayed(40.0, wait_s=15.0),
)


class Storm(Weighted):
    """Faults on everything but the probe of a starting producer, which must refuse a store that answers nonsense."""

    def __call__(self, verb: str, key: str, rng: random.Random) -> Fault | None:
        fault = super().__call__(verb, key, rng)
        return None if key.startswith("probe/") and fault is not None and fault.told is Told.TAKEN else fault


@dataclass(frozen=True, slots=True)
class Life:
    """One run of a process: undisturbed, starved, killed at its nth await, or frozen there (perhaps replaced meanwhile)."""

    kill_at: int | None = None
    freeze_at: int | None = None
    freeze_s: float = 0.0
    replaced: bool = False  # a successor starts while this one is frozen
    stalls: float = 0.0  # chance that an await takes a second longer
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


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    name: str
    every: int  # steps between checkpoints
    keep: int
    rollback: float  # chance after each checkpoint of resuming from a kept one
    behind: float  # chance of trying to register an older checkpoint
    begins_s: float
    step_s: float
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class ReclaimerPlan:
    name: str
    every_s: float
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    slices: int
    segment_steps: int
    versions_max: int
    faults: Mapping[Fault, float]
    producers: tuple[ProducerPlan, ...]
    trainers: tuple[TrainerPlan, ...]
    reclaimers: tuple[ReclaimerPlan, ...]
    watchers: int
    seal: bool


def scenario(seed: int, *, rush: bool | None = None) -> Scenario:
    """The scenario of a seed. In a rush (forced, forbidden, or left to the seed) starved reclaimers run all the time and
    trainers want back what is just going."""
    rng = random.Random(f"scenario/{seed}")
    storm = rng.choice((0.0, 0.01, 0.03, 0.08))
    kinds = rng.sample(_KINDS, rng.randint(2, 6))
    trainers = rng.choice((1, 1, 1, 2))
    rush = rng.random() < 0.1 if rush is None else rush
    return Scenario(
        seed=seed,
        slices=rng.choice((1, 2, 3)),
        segment_steps=rng.choice((2, 4, 8, 64)),
        versions_max=rng.choice((4, 8, 1024)),
        faults={kind: storm / len(kinds) for kind in kinds} if storm else {},
        producers=tuple(_producer(rng, number) for number in range(rng.choice((1, 2, 2, 3)))),
        trainers=tuple(_trainer(rng, number, rush=rush) for number in range(trainers)),
        reclaimers=tuple(_reclaimer(rng, number, rush=rush) for number in range(rng.choice((1, 2, 2)))),
        watchers=rng.choice((0, 1, 1)),
        seal=rng.random() < 0.25,
    )


def _lives(
    rng: random.Random, *, most: int, reach: int, freeze: float, replaced: bool = False
) -> tuple[Life, ...]:
    """Some disturbed lives; after them a process lives undisturbed."""
    lives = []
    for _ in range(rng.choice((0, 0, 1, 1, most))):
        at = rng.randint(1, reach)
        restart_s = rng.choice((0.0, 0.1, 2.0, 30.0))
        if rng.random() < freeze:
            freeze_s = rng.choice((1.0, 20.0, 120.0, 300.0))
            lives.append(
                Life(
                    freeze_at=at,
                    freeze_s=freeze_s,
                    replaced=replaced and rng.random() < 0.7,
                    restart_s=restart_s,
                )
            )
        else:
            lives.append(Life(kill_at=at, restart_s=restart_s))
    return tuple(lives)


def _producer(rng: random.Random, number: int) -> ProducerPlan:
    return ProducerPlan(
        name=f"p{number}",
        total=rng.randint(3, 14),
        gap_s=rng.choice((0.0, 0.01, 0.1, 1.0)),
        max_delay_s=rng.choice((0.0, 0.2, 5.0)),
        retire=rng.random() < 0.2,
        begins_s=rng.choice((0.0, 0.0, 0.5, 20.0)),
        lives=_lives(rng, most=3, reach=60, freeze=0.4, replaced=True),
    )


def _trainer(rng: random.Random, number: int, *, rush: bool) -> TrainerPlan:
    return TrainerPlan(
        name=f"g{number}",
        every=rng.randint(1, 5),
        keep=rng.randint(1, 3),
        rollback=rng.choice((0.0, 0.2)),
        behind=0.5 if rush else rng.choice((0.0, 0.2)),
        begins_s=rng.choice((0.0, 0.0, 3.0, 40.0)),
        step_s=rng.choice((0.0, 0.05, 0.5)),
        lives=_lives(rng, most=2, reach=120, freeze=0.3),
    )


def _reclaimer(rng: random.Random, number: int, *, rush: bool) -> ReclaimerPlan:
    return ReclaimerPlan(
        name=f"r{number}",
        every_s=0.05 if rush else rng.choice((0.5, 2.0, 10.0)),
        lives=(*_lives(rng, most=4, reach=120, freeze=0.3), Life(stalls=0.1 if rush else 0.0)),
    )
