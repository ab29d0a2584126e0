"""Many small files, and many readers: the cost of a file, not that of a byte.

First reads need a cold mount each time, so every round mounts everything afresh, ours primed as it would be by the
time a trainer comes to these steps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from bench.bed import Bed
from bench.machine import MIB, program, run
from bench.report import Row, at_least, at_most, median
from bench_read.peers import Peers

RANKS, WORKERS_PER_RANK = 8, 4


class Small:
    """The stages that read small files."""

    def __init__(self, bed: Bed, peers: Peers) -> None:
        self._bed = bed
        self._peers = peers
        self._plan = bed.plan
        self._random = random.Random(1)
        self._count = bed.plan.small_steps * bed.plan.small_ranks

    def _bodies(self) -> Iterator[list[bytes]]:
        draw = random.Random(2)
        for _ in range(self._plan.small_steps):
            yield [draw.randbytes(self._plan.small_bytes) for _ in range(self._plan.small_ranks)]

    @cached_property
    def url(self) -> str:
        """The lake, and the same files for the peers and on the local file system."""
        self._bed.report.say(f"making {self._count} small files, everywhere")
        named = [
            (f"small/{step:03d}-{rank:03d}.bin", body)
            for step, batch in enumerate(self._bodies())
            for rank, body in enumerate(batch)
        ]
        self._peers.hold("small", named)
        (self._local / "small").mkdir(parents=True)
        for name, body in named:
            (self._local / name).write_bytes(body)
        self._names = [name for name, _ in named]
        return self._bed.lake("small", self._plan.small_ranks, self._bodies())

    @cached_property
    def _local(self) -> Path:
        return self._bed.directory / "local-small"

    def _read(self, paths: Sequence[Path], *, workers: int, loader: str) -> float:
        """Files per second."""
        listed = self._bed.directory / "paths.txt"
        listed.write_text("\n".join(map(str, paths)))
        order = {"paths": str(listed), "workers": workers, "loader": loader}
        done = run(program("bench_read.programs.many_files", json.dumps(order)))
        answer = json.loads(done.stdout)
        assert answer["bytes"] == len(paths) * self._plan.small_bytes
        return float(len(paths) / answer["seconds"])

    def _ours(self, loader: str, workers: int) -> tuple[float, float]:
        """Files per second, and file system requests per file."""
        plan = self._plan
        options = ["--ranks", f"0-{plan.small_ranks - 1}", "--prefetch", str(plan.small_steps)]
        budget = self._count * plan.small_bytes * 3 // MIB + 256
        with self._bed.mounted(self.url, *options, "--memory", f"{budget}M") as mount:
            if not mount.primed(self._count):
                self._bed.report.say(f"NOT everything could be primed: {mount.data()}")
            paths = [mount.path(step, rank) for step in range(plan.small_steps) for rank in range(plan.small_ranks)]
            before = mount.requests()
            rate = self._read(paths, workers=workers, loader=loader)
            spent = {name: count for name, count in mount.spent(before).items() if name != "forget"}
        self._bed.report.figures[f"requests of {self._count} small files, {loader}"] = spent
        return rate, sum(spent.values()) / self._count

    def first_reads(self) -> None:
        """Every side once per round, in an order drawn afresh."""
        assert self.url
        rates: dict[str, list[float]] = {}
        requests: list[float] = []
        for _ in range(max(2, self._plan.rounds // 2 + 1)):
            sides = ["stepfs", "ext4", *(peer.name for peer in self._peers.all)]
            for side in self._random.sample(sides, len(sides)):
                self._once(side, rates, requests)
        self._bed.report.figures["small files per s"] = rates
        speed = {side: median(values) for side, values in rates.items()}
        best = self._peers.best(speed)
        ours, workers = speed["stepfs"], self._plan.workers
        what = f"{self._count} files of {self._plan.small_bytes >> 10} KiB, DataLoader × {workers}"
        self._bed.report.add(
            at_least(5, what, f"{ours:,.0f} files/s", f"{best} {speed[best]:,.0f}", ours / speed[best]),
            at_least(0.06, what, f"{ours:,.0f} files/s", f"ext4 {speed['ext4']:,.0f}", ours / speed["ext4"]),
            at_most(3, "FUSE requests per such file", f"{max(requests):.2f}", "", max(requests), ""),
        )

    def _once(self, side: str, rates: dict[str, list[float]], requests: list[float]) -> None:
        workers = self._plan.workers
        if side == "stepfs":
            rate, count = self._ours("torch", workers)
            requests.append(count)
        elif side == "ext4":
            paths = [self._local / name for name in self._names]
            if side not in rates:
                self._read(paths, workers=workers, loader="plain")
            rate = self._read(paths, workers=workers, loader="torch")
        else:
            peer = next(peer for peer in self._peers.all if peer.name == side)
            with peer.mounted() as mount:
                paths = [mount / name for name in self._names]
                rate = self._read(paths, workers=workers, loader="torch")
        rates.setdefault(side, []).append(rate)

    def many_readers(self) -> None:
        """8 ranks × 4 workers on one mount, plain forked readers: whether one daemon holds."""
        assert self.url
        workers = RANKS * WORKERS_PER_RANK
        paths = [self._local / name for name in self._names]
        rounds = range(2)
        ours = [self._ours("plain", workers)[0] for _ in rounds]
        local = [self._read(paths, workers=workers, loader="plain") for _ in rounds]
        one = [self._ours("plain", 1)[0] for _ in rounds]
        text = f"1 reader {median(one):,.0f}, ext4 {median(local):,.0f} files/s"
        self._bed.report.add(
            Row(
                f"the same files, {workers} plain readers",
                f"{median(ours):,.0f} files/s",
                text,
                median(ours) / median(one),
            )
        )
