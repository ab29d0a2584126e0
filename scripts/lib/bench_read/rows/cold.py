"""Cold reads: nothing fetched ahead, nothing cached by the client; beside other mounts and plain parallel GETs.

Twice: with the server's own pages warm, so that the clients are what differs, and with every cache dropped. The mount has
memory for two files and has read two others before, so that its buffers were touched, as those of the plain GETs are.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import servers

from bench.bed import Bed, Mount, data_objects
from bench.machine import MIB, drop_caches, touch_memory
from bench.report import Row
from bench_read.peers import PREFIX, Peers
from bench_read.rows.large_files import RAW, Large

THREADS = (4, 8)
_TOUCHED_FILES = 16


class Cold:
    """The lake of large files, once more."""

    def __init__(self, bed: Bed, peers: Peers, large: Large) -> None:
        self._bed = bed
        self._peers = peers
        self._large = large
        self._random = random.Random(6)
        self._seconds: dict[str, list[float]] = {}

    def measure(self) -> None:
        """One file per round and side, each read once in its life."""
        objects = data_objects(self._large.url)
        for server in ("warm", "cold"):
            self._seconds = {}
            with ExitStack() as stack:
                options = ["--prefetch", "0", "--memory", f"{2 * self._bed.plan.file_bytes // MIB + 64}M"]
                mount = stack.enter_context(self._bed.mounted(self._large.url, *options))
                for other in range(RAW + 1, RAW + 3):
                    self._bed.read_once(mount.path(0, other))
                mounts = {peer.name: stack.enter_context(peer.mounted()) for peer in self._peers.all}
                for number in range(self._bed.plan.rounds):
                    dropped = drop_caches()
                    touch_memory(_TOUCHED_FILES * self._bed.plan.file_bytes)
                    if server == "warm":
                        for key in (self._object(number), objects[number]):
                            self._get("boto3", key, THREADS[0])
                    self._round(number, server, mount, mounts)
            speed = self._bed.speeds(f"cold, server {server}", self._seconds, self._bed.plan.file_bytes)
            self._judge(server if dropped else f"{server}, caches not dropped", speed)

    def _round(self, number: int, server: str, mount: Mount, mounts: dict[str, Path]) -> None:
        turns = ["stepfs", *mounts, "http", *(f"boto3 × {threads}" for threads in THREADS)]
        for turn in self._random.sample(turns, len(turns)):
            if server == "cold":
                drop_caches()
            if turn == "stepfs":
                seconds = self._bed.read_once(mount.path(number, RAW))
            elif turn in mounts:
                seconds = self._bed.read_once(mounts[turn] / f"large/{number:02d}.bin")
            else:
                kind, _, threads = turn.partition(" × ")
                seconds = self._get(kind, self._object(number), int(threads or THREADS[0]))
            self._seconds.setdefault(turn, []).append(seconds)

    def _get(self, kind: str, key: str, threads: int) -> float:
        size = self._bed.plan.file_bytes
        order = {"bucket": servers.BUCKET, "keys": [key], "bytes": size, "threads": threads}
        return float(self._bed.probe(kind=kind, **order)["seconds"][0])

    def _object(self, number: int) -> str:
        return f"{PREFIX}/large/{number:02d}.bin"

    def _judge(self, server: str, speed: dict[str, float]) -> None:
        ours = speed["stepfs"]
        gets = max((f"boto3 × {threads}" for threads in THREADS), key=speed.__getitem__)
        best = self._peers.best(speed)
        what = f"cold, nothing fetched ahead; server {server}"
        if server.startswith("warm"):
            self._bed.ratio(0.9, what, ours, f"{gets} threads", speed[gets])
            self._bed.ratio(2, what, ours, f"best peer: {best}", speed[best])
            self._bed.report.add(Row("limit: SeaweedFS, bare HTTP × 4", f"{speed['http']:,.0f} MB/s"))
        else:
            text = f"{gets} {speed[gets]:,.0f}, {best} {speed[best]:,.0f} MB/s"
            self._bed.report.add(Row(what, f"{ours:,.0f} MB/s", text, ours / speed[gets]))
