"""The pacing of many producers on one log, as a discrete-event model: no store, no tasks, seconds of a made-up clock.

An attempt reads the head at a quarter of its round trips and creates at three quarters; it wins if nobody created in
between. Appends arrive at random. The real `Pacer` decides when to try.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from stepfs_producer.pace import Pacer, contenders

Exposure = Callable[[float, random.Random], float]  # (now, randomness) → seconds an attempt is exposed


@dataclass
class Node:
    pacer: Pacer
    period_s: float
    pending: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    last_version: int = -(10**9)
    commits: int = 0
    lost: int = 0
    busy: bool = False
    gone: bool = False


@dataclass
class Result:
    nodes: list[Node]

    @property
    def lost_share(self) -> float:
        lost = sum(node.lost for node in self.nodes)
        return lost / max(1, lost + sum(node.commits for node in self.nodes))

    @property
    def spread(self) -> float:
        commits = [node.commits for node in self.nodes]
        return max(commits) / max(1, min(commits))

    def latency_s(self, share: float) -> float:
        found = sorted(latency for node in self.nodes for latency in node.latencies)
        return found[int(len(found) * share)]


class Model:
    """Producers, an event queue, and a head that is just a number."""

    def __init__(self, periods_s: list[float], exposure: Exposure, *, delay_max_s: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.exposure = exposure
        self.head = 0
        self.warm_s = 0.0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.nodes = [
            Node(Pacer(delay_max_s=delay_max_s, draw=self.rng.uniform), period) for period in periods_s
        ]
        for node in self.nodes:
            self.at(self.rng.uniform(0, node.period_s), self.append, node)

    def at(self, time_s: float, what: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(
            self.events,
            (time_s, len(self.events) + self.rng.getrandbits(32), lambda now: what(now, *arguments)),
        )

    def run(self, seconds: float) -> Result:
        self.warm_s = seconds / 4
        while self.events and self.events[0][0] < seconds:
            now, _, event = heapq.heappop(self.events)
            event(now)
        return Result(self.nodes)

    def append(self, now: float, node: Node) -> None:
        node.pending.append(now)
        self.at(now + self.rng.expovariate(1 / node.period_s), self.append, node)
        self.arm(now, node)

    def arm(self, now: float, node: Node) -> None:
        if not node.busy and not node.gone and node.pending:
            node.busy = True
            due_s = node.pacer.due_s(oldest_s=node.pending[0], crowded=False)
            self.at(max(now, due_s), self.start, node)

    def start(self, now: float, node: Node) -> None:
        exposed_s = self.exposure(now, self.rng)
        self.at(now + exposed_s / 2, self.read, node, now, exposed_s)

    def read(self, now: float, node: Node, started_s: float, exposed_s: float) -> None:
        node.pacer.others = contenders(self.head - n.last_version for n in self.nodes if n is not node)
        self.at(now + exposed_s, self.create, node, started_s, exposed_s, self.head, len(node.pending))

    def create(
        self, now: float, node: Node, started_s: float, exposed_s: float, head: int, count: int
    ) -> None:
        won = head == self.head
        if won:
            self.head += 1
            node.last_version = self.head
            done, node.pending = node.pending[:count], node.pending[count:]
            if now > self.warm_s:
                node.latencies += [now - appended_s for appended_s in done]
        if now > self.warm_s:
            node.commits += won
            node.lost += not won
        self.at(now + exposed_s / 2, self.answered, node, started_s, exposed_s, won)

    def answered(self, now: float, node: Node, started_s: float, exposed_s: float, won: bool) -> None:
        if won:
            node.pacer.won(started_s=started_s, exposure_s=exposed_s)
        else:
            node.pacer.lost(ended_s=now, exposure_s=exposed_s)
        node.busy = False
        self.arm(now, node)


def ten_ms(_now: float, rng: random.Random) -> float:
    return rng.uniform(0.007, 0.013)


def simulate(
    count: int,
    *,
    seconds: float,
    period_s: float = 0.3,
    delay_max_s: float = 60.0,
    exposure: Exposure = ten_ms,
) -> Result:
    return Model([period_s] * count, exposure, delay_max_s=delay_max_s, seed=count).run(seconds)


@pytest.mark.parametrize(("count", "seconds"), [(2, 60), (4, 60), (16, 200), (64, 600), (256, 400)])
def test_few_attempts_are_lost_whatever_the_number_of_producers(count: int, seconds: float) -> None:
    result = simulate(count, seconds=seconds)
    assert result.lost_share <= 0.25
    few_commits_each = count == 256
    assert result.spread <= (1.5 if few_commits_each else 1.2), "nobody is starved, nobody is favoured"


def test_one_producer_alone_commits_back_to_back() -> None:
    result = simulate(1, seconds=30, period_s=0.001)
    assert result.lost_share == 0
    assert result.latency_s(0.99) < 5 * 0.02


@pytest.mark.parametrize("count", [4, 16, 64])
def test_latency_grows_with_the_interval_of_the_model_and_no_more(count: int) -> None:
    result = simulate(count, seconds=100)
    interval_s = (count - 1) * 0.01 / 0.2
    assert result.latency_s(0.99) < 1.25 * interval_s + 0.15


def test_a_slower_store_makes_commits_rarer_and_keeps_them_flowing() -> None:
    """τ rises tenfold half-way: the share of lost attempts stays, everything appended is still committed."""

    def exposure(now: float, rng: random.Random) -> float:
        return ten_ms(now, rng) * (10 if now > 200 else 1)

    result = simulate(16, seconds=600, exposure=exposure)
    assert result.lost_share <= 0.25
    assert all(len(node.pending) < 60 for node in result.nodes)


def test_losers_that_the_server_keeps_waiting_do_not_stop_the_rest() -> None:
    """One in ten attempts takes a second, as with a server that parks the losers of a race."""

    def exposure(now: float, rng: random.Random) -> float:
        return 1.0 if rng.random() < 0.1 else ten_ms(now, rng)

    result = simulate(16, seconds=200, exposure=exposure)
    assert result.latency_s(0.5) < 1.5
    assert all(node.pacer.interval_s < 5 for node in result.nodes)


def test_hazard_09_a_trickle_among_heavy_producers_meets_the_bound() -> None:
    periods = [0.02] * 15 + [20.0]
    result = Model(periods, ten_ms, delay_max_s=2.0, seed=1).run(400)
    trickle = result.nodes[-1].latencies
    assert trickle
    assert max(trickle) < 2.0 + 0.5


def test_when_most_producers_leave_the_rest_speeds_up() -> None:
    model = Model([0.1] * 32, ten_ms, delay_max_s=60.0, seed=3)
    model.run(60)
    crowded_s = model.nodes[0].pacer.interval_s
    for node in model.nodes[2:]:
        node.gone = True
    model.run(160)
    assert model.nodes[0].pacer.interval_s < crowded_s / 5
