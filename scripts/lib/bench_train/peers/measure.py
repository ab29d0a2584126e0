"""One peer and one kind of samples: written, trained undisturbed, killed and resumed, resumed with other workers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import servers

from bench.bed import Bed
from bench.report import median
from bench.slowed import SlowedStore
from bench_train.peers.catalogue import Peer
from bench_train.peers.job import Data, Order
from bench_train.peers.judgement import EXACT, Result, Resume, pace, resume
from bench_train.peers.nodes import Node, Nodes
from bench_train.peers.runs import FailedError, Trainer

SAVED_SHARE = 0.7  # of the epoch is trained when the state is saved
KILLED_SHARE = 0.75
WORKERS = 2
OTHER_WORKERS = 3
_SAID_CHARS = 4000
_FAR_AWAY_S = 90.0  # a peer that needs longer for an epoch is stopped


@dataclass(frozen=True, slots=True)
class Size:
    """Of the job for one kind."""

    batches: int
    batch: int
    compute_s: float
    beginning: int = 10
    rounds: int = 1


class Measurement:
    """All runs of one peer on one kind."""

    def __init__(
        self, bed: Bed, nodes: Nodes, store: SlowedStore, peer: Peer, data: Data, size: Size, python: Path
    ) -> None:
        self._bed, self._nodes, self._store, self._peer, self._size = bed, nodes, store, peer, size
        self._data = replace(data, batches=peer.batches(data.kind, data.batches))
        self._log = bed.directory / f"{peer.name}-{data.kind}.log"
        self._direct = Trainer(python, {}, self._log)
        self._trainer = Trainer(python, {"AWS_ENDPOINT_URL_S3": store.url}, self._log)
        self._place = f"peers-{peer.name}/{data.kind}"
        self.result = Result(peer.name, data.kind, ours=peer.ours, resumed_by=peer.resumes_by)

    def run(self) -> None:
        """Fills `result`. A part that fails leaves its cells empty and a reason."""
        parts: tuple[Callable[[], None], ...] = (self._write, self._undisturbed, self._killed)
        for part in parts:
            try:
                part()
            except FailedError as error:
                self.result.trouble = f"{part.__name__.strip('_')}: {error}"
                self.result.details["said"] = error.said[-_SAID_CHARS:]
                return

    def _order(self, do: str, node: Node | None = None) -> Order:
        where = self._bed.fresh(f"{self._peer.name}-{do}")
        cache = where / "cache"
        cache.mkdir()
        return Order(
            self._peer.name,
            do,
            self._data,
            servers.BUCKET,
            self._place,
            mount=node.mount if node else "",
            cache=str(cache),
            workers=WORKERS,
            state=str(where / "state"),
            journal=str(where / "journal"),
        )

    def _write(self) -> None:
        with self._nodes.writer(self._peer) as mount:
            order = replace(self._order("write"), mount=mount)
            self._direct.write(order)
        shutil.rmtree(order.cache)

    def _undisturbed(self) -> None:
        rounds = [self._epoch() for _ in range(self._size.rounds)]
        result, usual = self.result, {key: median([each[key] for each in rounds]) for key in rounds[0]}
        result.samples_per_s = usual["samples/s"]
        result.stall = usual["stall"]
        result.bytes_per_sample = usual["bytes per sample"]
        result.cpu_s_per_1000 = usual["CPU-s per 1000"]
        result.pss_mib = usual["PSS MiB"]
        result.first_s = usual["first batch s"]
        result.details["rounds"] = rounds

    def _epoch(self) -> dict[str, float]:
        sent = self._store.sent_bytes()
        with self._nodes.node(self._peer, self._place, self._store.url) as node:
            order = replace(self._order("train", node), compute_s=self._size.compute_s, seconds_max=_FAR_AWAY_S)
            journal, cpu, memory = self._trainer.epoch(order, node)
            sent = self._store.sent_bytes() - sent
            ready_s = node.ready_s
        shutil.rmtree(order.cache)
        self._whole = journal
        count = max(1, len(journal.samples()))
        found = pace(journal, beginning=self._size.beginning)
        return {
            "samples/s": found.samples_per_s,
            "stall": found.stall,
            "bytes per sample": sent / count,
            "CPU-s per 1000": 1000 * cpu / count,
            "PSS MiB": memory / 2**20,
            "first batch s": found.first_s,
            "samples": count,
            "imports s": journal.imported_s,
            "mount s": ready_s,
            "longest wait s": max(journal.waits[1:], default=0.0),
        }

    def _killed(self) -> None:
        """Resumed on the same node, whose caches are warm, and then, with other workers, on a new one."""
        result, whole = self.result, self._whole.samples()
        if self._whole.stopped:
            raise FailedError(f"{len(whole)} of {self._data.samples} samples in {_FAR_AWAY_S:g} s")
        if Counter(whole) != Counter(range(self._data.samples)):
            missing, twice = self._data.samples - len(set(whole)), len(whole) - len(set(whole))
            raise FailedError(f"the epoch lost {missing} and repeated {twice} samples even undisturbed")
        saved = round(SAVED_SHARE * len(self._whole.ids))
        killed = max(round(KILLED_SHARE * len(self._whole.ids)), saved + 1)
        with self._nodes.node(self._peer, self._place, self._store.url) as node:
            first = replace(self._order("train", node), save_at=saved, kill_at=killed)
            before = self._trainer.killed(first).samples(saved)
            again = replace(first, save_at=0, kill_at=0, resume=True, journal=f"{first.journal}-resumed")
            verdict, result.resume_s = self._resumed(again, node, before)
            result.resume, result.resume_exact = str(verdict), verdict == EXACT
        with self._nodes.node(self._peer, self._place, self._store.url) as node:
            shutil.rmtree(first.cache)  # the same path, as on a node of the same image, and empty
            Path(first.cache).mkdir()
            other = replace(again, mount=node.mount, workers=OTHER_WORKERS)
            verdict, _ = self._resumed(other, node, before)
            result.other_workers, result.other_workers_exact = str(verdict), verdict == EXACT
        shutil.rmtree(first.cache)

    def _resumed(self, order: Order, node: Node, before: list[int]) -> tuple[Resume | str, float | None]:
        """The verdict, or how the library refuses, and the seconds until the first batch that is new."""
        try:
            journal = self._trainer.epoch(order, node)[0]
        except FailedError as error:
            self.result.details["refused"] = error.said[-_SAID_CHARS:]
            return f"refused: {error}", None
        verdict = resume(self._whole.samples(), before, journal.samples())
        return verdict, journal.at[0] if journal.at else None
