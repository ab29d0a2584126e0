"""The contents of `.stepfs/status.json` and `config.json`, and the gauges of `metrics`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import trio

from stepfs import __version__
from stepfs.data.prefetch.prefetcher import Prefetcher
from stepfs.data.slices import Slices
from stepfs.follow.follower import Follower
from stepfs.follow.protocols import Reader
from stepfs.follow.waits import Waits
from stepfs.format.ids import JSON_SCHEMA
from stepfs.mount import documents
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.host.procfs import process_start
from stepfs.mount.options import MountOptions
from stepfs.mount.redact import redact_url
from stepfs.store.api import Store
from stepfs.view.ranks import RankMap
from stepfs.view.tree import Tree


@dataclass(slots=True)
class Machine:
    """Facts about a mount that are known only once it stands."""

    cache_dir: Path
    memory_bytes: int
    disk_bytes: int
    device: str | None = None
    kernel: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportedParts:
    """The parts of a mount that reports describe."""

    options: MountOptions
    store: Store
    reader: Reader
    machine: Machine
    meter: Meter
    known: LookupCounts
    files: FileTable
    ranks: RankMap
    tree: Tree
    slices: Slices
    prefetcher: Prefetcher
    waits: Waits
    follower: Follower


class Reports:
    """Reads all facts at each call; stores none."""

    def __init__(self, parts: ReportedParts) -> None:
        self._parts = parts

    def status(self) -> documents.Json:
        """`.stepfs/status.json`."""
        state, follower = self._parts.reader.state, self._parts.follower
        looked = follower.looked_at
        return {
            "schema": JSON_SCHEMA,
            "lake": self._parts.options.redacted()["lake"],  # type: ignore[dict-item]
            "lake_id": state.lake_id,
            "slices": state.slices,
            "grid": self._parts.reader.identity.grid.document(),  # type: ignore[dict-item]
            "ext": self._parts.reader.identity.ext,
            "world": self._parts.ranks.world,
            "micro_batches": self._parts.ranks.micro_batches,
            "head": state.version,
            "frontier": follower.frontier,
            "next_step": state.next_step,
            "first_step": self._parts.tree.first_visible(),
            "sealed": state.sealed,
            "time": state.time_ms / 1000 if state.version >= 0 else None,
            "total_bytes": state.total_bytes,
            "total_records": state.total_records,
            "group": self._parts.options.group,
            "need": self._parts.tree.need if self._parts.options.group is not None else None,
            "store": {
                "reachable": follower.trouble is None,
                "trouble": follower.trouble,
                "looked_s_ago": None if looked is None else round(trio.current_time() - looked, 3),
                "poll_interval_s": round(follower.interval_s, 3),
                "requests": self._parts.store.counts.requests,
                "bytes_read": self._parts.store.counts.bytes_read,
                "connections": self._parts.slices.facts.connections_limit,
            },
            "cache": dict(self._parts.slices.facts.budgets()),
            "order_needs_from": self._parts.prefetcher.hints.needed_from(),
            "last_step": self._parts.meter.last_step,
            "waited_s": round(self._parts.meter.waited.seconds(), 3),
            "waiting": self._parts.waits.waiting,
            "open_files": len(self._parts.files),
            "known_directories": len(self._parts.known),
            "requests": dict(sorted(self._parts.meter.requests.items())),
            "faults": self._parts.meter.faults,
            "bytes_read": self._parts.meter.bytes_read,
            "data": dict(self._parts.slices.counts.as_dict()),
            "producers": documents.describe_producers(state),
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self._parts.meter.started_at, 1),
        }

    def orders(self) -> documents.Json:
        """A file in `.stepfs/order/`: the announced order, and the first step that a checkpoint must keep for it."""
        hints = self._parts.prefetcher.hints
        return {
            "schema": JSON_SCHEMA,
            "needed_from": hints.needed_from(),
            "orders": [dict(order) for order in hints.describe()],
        }

    def config(self) -> documents.Json:
        """`.stepfs/config.json`: effective options, and the facts by which `stepfs unmount` finds this process."""
        return {
            "schema": JSON_SCHEMA,
            "options": self._parts.options.redacted(),  # type: ignore[dict-item]
            "lake_id": self._parts.reader.identity.lake_id,
            "directory": str(self._parts.options.directory),
            "grid": self._parts.reader.identity.grid.document(),  # type: ignore[dict-item]
            "world": self._parts.ranks.world,
            "micro_batches": self._parts.ranks.micro_batches,
            "memory_bytes": self._parts.machine.memory_bytes,
            "disk_bytes": self._parts.machine.disk_bytes,
            "cache_dir": str(self._parts.machine.cache_dir),
            "device": self._parts.machine.device,
            "kernel": dict(self._parts.machine.kernel),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
        }

    def line(self) -> str:
        """One line for a supervisor's status; it changes with events, not with time."""
        parts = self._parts
        trouble = parts.follower.trouble
        steps = f"steps {parts.tree.first_visible()} to {parts.follower.frontier}"
        return f"serving {parts.options.directory}, {steps}" + (f"; {trouble}" if trouble else "")

    def labels(self) -> dict[str, str]:
        """The labels that distinguish this mount's metrics from those of others."""
        options, identity = self._parts.options, self._parts.reader.identity
        return {
            "lake": redact_url(options.lake),
            "lake_id": identity.lake_id,
            "directory": str(options.directory),
            "group": options.group or "",
            "version": __version__,
        }

    def gauges(self) -> dict[str, float]:
        state, last = self._parts.reader.state, self._parts.meter.last_step
        return {
            "frontier_step": state.next_step - 1,
            "first_step": self._parts.tree.first_visible(),
            "last_read_step": -1 if last is None else last,
            "sealed": float(state.sealed),
            "newest_commit_timestamp_seconds": state.time_ms / 1000,
            "poll_interval_seconds": self._parts.follower.interval_s,
            "store_up": float(self._parts.follower.trouble is None),
            "waiting_requests": self._parts.waits.waiting,
            "open_files": len(self._parts.files),
            "known_directories": len(self._parts.known),
            **self._parts.slices.facts.budgets(),
            "connections_limit": self._parts.slices.facts.connections_limit,
            "start_timestamp_seconds": self._parts.meter.started_at,
        }
