"""From a seed to everything that will go wrong. Pure.

Most scenarios are small, for what goes wrong needs few; some have as many producers as a lake sees in earnest. Each
kind of trouble is drawn by itself, so that they meet each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from damage import Rot
from doubles.faults import (
    CONFLICT_409,
    ERROR_500,
    ERROR_500_APPLIED,
    FALSE_412,
    HALF_DELETED,
    LOST_REQUEST,
    LOST_RESPONSE,
    OWN_412,
    PROXY_404,
    RESET_AFTER,
    RESET_BEFORE,
    SHORT_BODY,
    STALE_404,
    THROTTLED_503,
    Fault,
    Told,
    Weighted,
    delayed,
    stale_list,
)
from flavours import Flavour, lean
from scenario import (
    FollowerPlan,
    ForkPlan,
    Life,
    NodePlan,
    ProducerPlan,
    ReclaimerPlan,
    ReplicaPlan,
    RollBack,
    Scenario,
    TrainerPlan,
    WatchedPlan,
    WatcherPlan,
)

# What COMMIT.md assumes not to happen. Nothing wrong may come of it all the same, only `CorruptError` and delay.
_LIES: tuple[Fault, ...] = (stale_list(1.0), stale_list(30.0), STALE_404)

_KINDS: tuple[Fault, ...] = (
    LOST_REQUEST, LOST_RESPONSE, RESET_BEFORE, RESET_AFTER, ERROR_500, ERROR_500_APPLIED, THROTTLED_503, CONFLICT_409,
    FALSE_412, OWN_412, SHORT_BODY, PROXY_404, HALF_DELETED, delayed(0.05), delayed(3.0, wait_s=0.5),
    delayed(40.0, wait_s=15.0),
)  # fmt: skip


_STORM_S = 2 * 3600.0
_ROLLED_BACK = 0.12  # of the usual scenarios, those in which the store is put back to an older copy

_RUNS = (("trainer",), ("trainer",), ("trainer", "trainer"), ("watched",), ("trainer", "watched"))


class Storm(Weighted):
    """Faults, but where one would only say that the store is unfit: the probe of a starting producer.

    A lie is told only where the protocol lives with it: control records and TGBs are taken at the store's word, and only
    commits and snapshots hide. It ends: a command of fifty requests, none of them retried, that must do without a fault
    may never succeed while one request in ten fails.
    """

    def __init__(self, probabilities: Mapping[Fault, float], clock: Callable[[], float]) -> None:
        super().__init__(probabilities)
        self._clock = clock

    def __call__(self, verb: str, key: str, rng: random.Random) -> Fault | None:
        fault = super().__call__(verb, key, rng)
        if fault is None or self._clock() > _STORM_S:
            return None
        if key.startswith("probe/"):
            return None if fault.told in {Told.TAKEN, Told.ABSENT} or fault.stale_s else fault
        if fault is STALE_404 and "/log/" not in key and "/snapshot/" not in key:
            return None
        return fault


def scenario(seed: int, *, flavour: Flavour | None = None) -> Scenario:
    """The scenario of a seed; `flavour` None: left to the seed."""
    rng = random.Random(f"scenario/{seed}")
    flavour = flavour or rng.choices(list(Flavour), [0.70, 0.08, 0.08, 0.08, 0.06])[0]
    faults = _faults(rng, lying=rng.random() < 0.08)
    runs = rng.choice(_RUNS)
    plan = Scenario(
        seed=seed,
        slices=rng.choice((1, 2, 3)),
        segment_steps=rng.choice((2, 4, 8, 64)),
        versions_max=rng.choice((4, 8, 1024)),
        page=rng.choice((None, None, 2, 5)),
        faults=faults,
        lying=any(fault in _LIES for fault in faults),
        skewed=rng.random() < 0.3,
        rots=tuple(_rot(rng) for _ in range(rng.choice((1, 3)) if rng.random() < 0.1 else 0)),
        producers=_producers(rng),
        trainers=tuple(_trainer(rng, f"g{n}") for n, kind in enumerate(runs) if kind == "trainer"),
        watched=tuple(_watched(rng, f"g{n}") for n, kind in enumerate(runs) if kind == "watched"),
        reclaimers=tuple(_reclaimer(rng, f"r{n}") for n in range(rng.choice((1, 2, 2)))),
        forks=(_fork(rng),) if rng.random() < 0.1 else (),
        watchers=tuple(WatcherPlan(f"w{n}", 0.0, ()) for n in range(rng.choice((0, 1, 1)))),
        seal=rng.random() < 0.25,
    )
    plan = lean(_with_more(plan, rng), flavour, rng)
    if flavour is Flavour.USUAL:
        plan = _rolled_back(plan, random.Random(f"roll back/{seed}"))
    return plan if plan.roll_back else _with_replica(plan, random.Random(f"replica/{seed}"))


def _rolled_back(plan: Scenario, rng: random.Random) -> Scenario:
    """An older copy of the store is put back while all goes on. Nobody sleeps between a look and the create that it was for:
    he would take a slot behind the hole. The server is away for more than the 10 s of which a producer believes what it saw.
    """
    if plan.lying or rng.random() > _ROLLED_BACK:
        return plan

    def awake(lives: tuple[Life, ...]) -> tuple[Life, ...]:
        return tuple(life for life in lives if life.freeze_at is None and not life.stalls)

    return replace(
        plan,
        rots=(), watched=(), forks=(), followers=(), seal=False,
        producers=tuple(
            replace(
                one, lives=awake(one.lives), gap_s=rng.choice((0.3, 1.0, 3.0)),
                max_lead=one.max_lead if plan.trainers and not plan.watched else None,
            )
            for one in plan.producers
        ),
        trainers=tuple(replace(one, lives=awake(one.lives), behind=0.0, retires=0.0) for one in plan.trainers),
        reclaimers=tuple(replace(one, lives=awake(one.lives)) for one in plan.reclaimers),
        watchers=(*plan.watchers, WatcherPlan("w9", 0.0, ())),
        roll_back=RollBack(rng.uniform(0.2, 5.0), rng.uniform(0.2, 10.0), rng.choice((11.0, 25.0))),
    )  # fmt: skip


def _with_more(plan: Scenario, rng: random.Random) -> Scenario:
    """What depends on who takes part: followers of groups, bounds on the lead, machines far from the store."""
    runs: list[TrainerPlan | WatchedPlan] = [*plan.trainers, *plan.watched]
    followers = tuple(
        FollowerPlan(f"m{n}", rng.choice(runs).name, _lives(rng, most=2, reach=60, freeze=0.5))
        for n in range(rng.choice((0, 0, 1, 2)))
    )
    names = [one.name for cast in (plan.producers, runs, plan.reclaimers, followers) for one in cast]
    far = {name: rng.choice((5.0, 25.0)) for name in names if rng.random() < 0.5}
    plan = replace(plan, followers=followers, far=far if rng.random() < 0.15 else {})
    plan = _with_unstored(plan, random.Random(f"unstored/{plan.seed}"))
    if plan.forks or any(run.retires or run.behind for run in plan.trainers) or rng.random() > 0.15:
        return plan  # what a dead fork, a run that begins again or an old checkpoint holds, no new checkpoint gives up
    # A trainer keeps the steps of `keep` checkpoints and reads on to the next; nobody may wait for the other for ever.
    lead = max(run.every * (run.keep + 2) for run in runs) + 2 * len(plan.producers)
    return replace(plan, producers=tuple(replace(one, max_lead=lead) for one in plan.producers))


def _with_replica(plan: Scenario, rng: random.Random) -> Scenario:
    """Nobody bounds the lead: what a run at a replica that was lost holds, no new checkpoint gives up."""
    if rng.random() > 0.15:
        return plan
    lives = [_lives(rng, most=4, reach=200, freeze=0.3) for _ in range(rng.choice((1, 1, 2)))]
    replica = ReplicaPlan(
        "c0", rng.choice((0.2, 1.0, 5.0)), rng.choice((0, 1, 3)), rng.random() < 0.3, tuple(lives),
        _lives(rng, most=2, reach=120, freeze=0.3),
    )  # fmt: skip
    if rng.random() < 0.5:
        replica = replace(replica, near=_lives(rng, most=1, reach=120, freeze=0.3))
    return replace(plan, replicas=(replica,), producers=tuple(replace(one, max_lead=None) for one in plan.producers))


def _with_unstored(plan: Scenario, rng: random.Random) -> Scenario:
    """Producers that die between a commit and the segments that it filled: nobody stores them until the next boundary."""
    if rng.random() > 0.1:
        return plan
    dies = Life(killed_sending=("create", "/index/", 1), restart_s=rng.choice((0.1, 30.0)))
    producers = tuple(replace(one, lives=(*one.lives, dies, dies)) for one in plan.producers)
    watchers = tuple(WatcherPlan(f"w{n}", 0.0, ()) for n in range(2))
    return replace(plan, producers=producers, watchers=watchers)


def _faults(rng: random.Random, *, lying: bool) -> dict[Fault, float]:
    storm = rng.choice((0.0, 0.01, 0.03, 0.08))
    kinds = rng.sample(_KINDS, rng.randint(2, 6))
    faults = {kind: storm / len(kinds) for kind in kinds} if storm else {}
    return faults | {rng.choice(_LIES): rng.choice((0.02, 0.2))} if lying else faults


def _rot(rng: random.Random) -> Rot:
    return Rot(
        rng.choice(("log", "snapshot", "snapshot", "index", "control", "control", "lake")),
        rng.uniform(0, 20),
        rng.choice((1.0, 30.0)),
    )


def _lives(rng: random.Random, *, most: int, reach: int, freeze: float, replaced: bool = False) -> tuple[Life, ...]:
    """Some disturbed lives; after them a process lives undisturbed."""
    lives = []
    for _ in range(rng.choice((0, 0, 1, 1, most))):
        at = rng.randint(1, reach)
        restart_s = rng.choice((0.0, 0.1, 2.0, 30.0))
        if rng.random() < 0.1:
            since_s = rng.choice((0.0, 0.5, 5.0))
            lives.append(Life(locked_out_s=(since_s, since_s + rng.choice((1.0, 20.0, 90.0))), restart_s=restart_s))
        elif rng.random() < freeze:
            freeze_s = rng.choice((1.0, 20.0, 120.0, 300.0))
            lives.append(
                Life(freeze_at=at, freeze_s=freeze_s, replaced=replaced and rng.random() < 0.7, restart_s=restart_s)
            )
        else:
            lives.append(Life(kill_at=at, restart_s=restart_s))
    return tuple(lives)


def _producers(rng: random.Random) -> tuple[ProducerPlan, ...]:
    """One to three mostly; sometimes a handful, and now and then as many as contend in earnest."""
    crowd = rng.random()
    if crowd < 0.84:
        return tuple(_producer(rng, n, (3, 14)) for n in range(rng.choice((1, 2, 2, 3))))
    if crowd < 0.96:
        return tuple(_producer(rng, n, (2, 5)) for n in range(rng.randint(3, 6)))
    return tuple(_producer(rng, n, (1, 3)) for n in range(rng.randint(7, 16)))


def _producer(rng: random.Random, number: int, records: tuple[int, int]) -> ProducerPlan:
    return ProducerPlan(
        name=f"p{number}", total=rng.randint(*records), gap_s=rng.choice((0.0, 0.01, 0.1, 1.0)),
        max_delay_s=rng.choice((0.0, 0.2, 5.0)), retire=rng.random() < 0.2,
        begins_s=rng.choice((0.0, 0.0, 0.5, 20.0)), lives=_lives(rng, most=3, reach=60, freeze=0.4, replaced=True),
        constructors=rng.choice((0, 0, 1, 3)), lost=rng.choice((0.0, 0.3)),
    )  # fmt: skip


def _trainer(rng: random.Random, name: str) -> TrainerPlan:
    return TrainerPlan(
        name=name, every=rng.randint(1, 5), keep=rng.randint(1, 3), rollback=rng.choice((0.0, 0.2)),
        behind=rng.choice((0.0, 0.2)), begins_s=rng.choice((0.0, 0.0, 3.0, 40.0)),
        step_s=rng.choice((0.0, 0.05, 0.5)), one_by_one=rng.random() < 0.5,
        lives=_lives(rng, most=2, reach=120, freeze=0.3), retires=rng.choice((0.0, 0.0, 0.0, 0.2)),
    )  # fmt: skip


def _watched(rng: random.Random, name: str) -> WatchedPlan:
    return WatchedPlan(
        name=name,
        every=rng.randint(1, 4),
        keep=rng.randint(1, 3),
        rollback=rng.choice((0.0, 0.2)),
        step_s=rng.choice((0.2, 0.5)),
        node=_node(rng, f"{name}n0"),
        lives=_lives(rng, most=2, reach=80, freeze=0.3),
    )


def _node(rng: random.Random, name: str) -> NodePlan:
    return NodePlan(
        name=name,
        lag_s=rng.choice((0.0, 0.0, 1.0, 4.0)),
        poll_s=rng.choice((1.0, 1.0, 5.0)),
        lives=_lives(rng, most=3, reach=60, freeze=0.5),
    )


def _fork(rng: random.Random) -> ForkPlan:
    return ForkPlan(
        name="f0", every=rng.randint(1, 5), step_s=rng.choice((0.0, 0.05, 0.5)),
        begins_s=rng.choice((0.5, 3.0, 20.0)), lives=_lives(rng, most=2, reach=80, freeze=0.3),
        again=rng.random() < 0.3, until_damage=rng.random() < 0.5,
    )  # fmt: skip


def _reclaimer(rng: random.Random, name: str) -> ReclaimerPlan:
    return ReclaimerPlan(
        name=name, every_s=rng.choice((0.5, 2.0, 10.0)), lives=_lives(rng, most=4, reach=120, freeze=0.3),
        grace_s=rng.choice((0.0, 0.0, 1.0, 10.0)), timer=rng.random() < 0.5,
    )  # fmt: skip
