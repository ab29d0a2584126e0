"""The pacing of many producers on one log, as a discrete-event model: no store, no tasks, seconds of a made-up clock.

An attempt reads the head at a quarter of its round trips and creates at three quarters; it wins if nobody created in
between. Appends arrive at random. The real `Pacer` decides when to try. Tests and scripts/bench_ingest use it, because
a hundred real producers in virtual time take minutes, and a thousand take hours.

A producer that is locked out asks for a pause of the log, as it does in the control sequence; a winner sees it with its
commit, and one that is locked out after its loss.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepfs.lake.log.append import ASKS_AFTER_S
from stepfs_producer.commit.pace import Pacer, contenders

Exposure = Callable[[float, random.Random], float]  # (now, randomness) → seconds an attempt is exposed

WARM_SHARE = 0.25  # of the run; not measured


@dataclass
class Node:
    """One producer."""

    pacer: Pacer
    period_s: float
    exposure: Exposure
    pending: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # append → committed
    last_version: int | None = None  # None: not in the log yet
    last_s: float = 0.0
    started: bool = True
    started_s: float = 0.0  # when its first commit landed
    commits: int = 0
    lost: int = 0
    busy: bool = False
    gone: bool = False
    pauses_asked: int = 0  # as this one knows


@dataclass
class Result:
    """The result of a run, its warm-up excluded."""

    nodes: list[Node]
    seconds: float
    measured_s: float
    start_attempts: int

    @property
    def lost_share(self) -> float:
        lost = sum(node.lost for node in self.nodes)
        return lost / max(1, lost + sum(node.commits for node in self.nodes))

    @property
    def spread(self) -> float:
        """Most commits of one producer over the least."""
        commits = [node.commits for node in self.nodes]
        return max(commits) / max(1, min(commits))

    @property
    def started_s(self) -> float:
        """When the last of those that started together had its first commit."""
        return max(node.started_s for node in self.nodes)

    def wait_s(self, share: float) -> float:
        """A quantile of all waits from append to commit; batches that still wait at the end count as if committed then."""
        left = [self.seconds - since for node in self.nodes if not node.gone for since in node.pending]
        found = sorted([*(wait for node in self.nodes for wait in node.waits), *left])
        return found[min(len(found) - 1, int(len(found) * share))]


class Model:
    """Producers, an event queue, and a head that is just a number."""

    def __init__(
        self,
        periods_s: Sequence[float],
        exposures: Exposure | Sequence[Exposure],
        *,
        delay_max_s: float = 5.0,
        seed: int = 0,
        start_together: bool = False,
        crowded_at: int | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.head = 0
        self.pauses_asked = 0
        self.warm_s = 0.0
        self.start_attempts = 0
        self.crowded_at = crowded_at
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        each = [exposures] * len(periods_s) if callable(exposures) else exposures
        self.nodes = [
            Node(Pacer(delay_max_s=delay_max_s, draw=self.rng.uniform), period_s, exposure)
            for period_s, exposure in zip(periods_s, each, strict=True)
        ]
        self.recent: dict[int, Node] = {}  # by id, the newest commit last
        self.numbers = 0
        for node in self.nodes:
            if start_together:
                node.started = False
                self.at(0.0, self.arm, node)
            else:
                self.at(self.rng.uniform(0, node.period_s), self.append, node)

    def at(self, time_s: float, what: Callable[..., None], *arguments: object) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (time_s, self.numbers, lambda now: what(now, *arguments)))

    def run(self, seconds: float) -> Result:
        self.warm_s = seconds * WARM_SHARE
        while self.events and self.events[0][0] < seconds:
            now, _, event = heapq.heappop(self.events)
            event(now)
        return Result(self.nodes, seconds, seconds - self.warm_s, self.start_attempts)

    def append(self, now: float, node: Node) -> None:
        node.pending.append(now)
        self.at(now + self.rng.expovariate(1 / node.period_s), self.append, node)
        self.arm(now, node)

    def arm(self, now: float, node: Node) -> None:
        if node.busy or node.gone or (node.started and not node.pending):
            return
        node.busy = True
        if not node.started:
            due_s = node.pacer.due_s(now_s=now, oldest_s=float("-inf"), crowded=False)
        else:
            crowded = self.crowded_at is not None and len(node.pending) >= self.crowded_at
            due_s = node.pacer.due_s(now_s=now, oldest_s=node.pending[0], crowded=crowded)
        self.at(due_s, self.start, node)

    def start(self, now: float, node: Node) -> None:
        exposed_s = node.exposure(now, self.rng)
        self.at(now + exposed_s / 2, self.read, node, now, exposed_s)

    def read(self, now: float, node: Node, started_s: float, exposed_s: float) -> None:
        self.look(node, now)
        self.at(now + exposed_s, self.create, node, started_s, exposed_s, self.head, len(node.pending))

    def look(self, node: Node, now: float) -> None:
        """A producer's knowledge from the head."""
        recent_s = node.pacer.recent_ms / 1000
        others = [
            self.head - other.last_version
            for other in reversed(self.recent.values())
            if other is not node and other.last_version is not None and now - other.last_s <= recent_s
        ]
        node.pacer.note(now, self.head, contenders(others), node.last_version)
        node.pacer.pauses.note(now, node.pauses_asked)

    def create(self, now: float, node: Node, started_s: float, exposed_s: float, head: int, count: int) -> None:
        won = head == self.head
        if won:
            self.head += 1
            node.last_version, node.last_s = self.head, now
            self.recent.pop(id(node), None)
            self.recent[id(node)] = node
        if not node.started:
            self.start_attempts += 1
            node.started_s = now
        elif won:
            done, node.pending = node.pending[:count], node.pending[count:]
            if now > self.warm_s:
                node.waits += [now - appended_s for appended_s in done]
        if now > self.warm_s and node.started:
            node.commits += won
            node.lost += not won
        self.at(now + exposed_s / 2, self.answered, node, started_s, exposed_s, won)

    def answered(self, now: float, node: Node, started_s: float, exposed_s: float, won: bool) -> None:
        pacer = node.pacer
        if won:
            pacer.won(started_s=started_s, exposure_s=exposed_s)
            node.pauses_asked = self.pauses_asked
        else:
            pacer.lost(ended_s=now, exposure_s=exposed_s)
            if pacer.is_locked_out:
                asks = now - pacer.losing_since_s >= ASKS_AFTER_S and pacer.pauses.may_ask(now)
                self.pauses_asked += asks and node.pauses_asked == self.pauses_asked
                node.pauses_asked = self.pauses_asked
        pacer.pauses.note(now, node.pauses_asked)
        node.busy = False
        if won and not node.started:
            node.started = True
            self.at(now + self.rng.uniform(0, node.period_s), self.append, node)
        else:
            self.arm(now, node)


def around(mean_s: float) -> Exposure:
    """Exposures that vary by 30 % around a mean."""
    return lambda _now, rng: rng.uniform(0.7, 1.3) * mean_s
