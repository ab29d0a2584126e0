"""The contents of `.stepfs/status.json` and `config.json`, and the gauges of `metrics`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import trio

from stepfs import __version__
from stepfs.follow.served import ServedLake
from stepfs.format.ids import JSON_SCHEMA
from stepfs.mount import documents
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.host.procfs import process_start
from stepfs.mount.options import MountOptions
from stepfs.mount.redact import redact_url, shown_path
from stepfs.view.ranks import RankMap


@dataclass(slots=True)
class Machine:
    """Facts about a mount that are known only once it stands."""

    cache_dir: Path
    memory_bytes: int
    disk_bytes: int
    device: str | None = None
    kernel: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Reports:
    """Reads all facts at each call; stores none."""

    lake: ServedLake
    options: MountOptions
    machine: Machine
    meter: Meter
    known: LookupCounts
    files: FileTable
    ranks: RankMap

    def status(self) -> documents.Json:
        """`.stepfs/status.json`."""
        state, follower = self.lake.log.state, self.lake.follower
        looked = follower.looked_at
        return {
            "schema": JSON_SCHEMA,
            "lake": self.options.redacted()["lake"],  # type: ignore[dict-item]
            "lake_id": state.lake_id,
            "origins": dict(state.origin_cuts),
            "slices": state.slices,
            "grid": self.lake.log.identity.grid.document(),  # type: ignore[dict-item]
            "ext": self.lake.log.identity.ext,
            "world": self.ranks.world,
            "micro_batches": self.ranks.micro_batches,
            "head": state.version,
            "frontier": follower.frontier,
            "next_step": state.next_step,
            "first_step": self.lake.tree.first_visible(),
            "sealed": state.sealed,
            "time": state.time_ms / 1000 if state.version >= 0 else None,
            "total_bytes": state.total_bytes,
            "total_records": state.total_records,
            "group": self.options.group,
            "need": self.lake.tree.need if self.options.group is not None else None,
            "store": {
                "reachable": follower.trouble is None or self.lake.log.astray is not None,
                "trouble": follower.trouble,
                "looked_s_ago": None if looked is None else round(trio.current_time() - looked, 3),
                "poll_interval_s": round(follower.interval_s, 3),
                "requests": self.lake.store.counts.requests,
                "bytes_read": self.lake.store.counts.bytes_read,
                "connections": self.lake.slices.connections_limit,
            },
            "cache": dict(self.lake.slices.budgets()),
            "order_needs_from": self.lake.prefetcher.hints.needed_from(),
            "last_step": self.meter.last_step,
            "waited_s": round(self.meter.waited.seconds(), 3),
            "waiting": self.lake.waits.waiting,
            "open_files": len(self.files),
            "known_directories": len(self.known),
            "requests": dict(sorted(self.meter.requests.items())),
            "faults": self.meter.faults,
            "bytes_read": self.meter.bytes_read,
            "data": dict(self.lake.slices.counts.as_dict()),
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self.meter.started_at, 1),
        }

    def orders(self) -> documents.Json:
        """A file in `.stepfs/order/`: the announced order, and the first step that a checkpoint must keep for it."""
        hints = self.lake.prefetcher.hints
        return {
            "schema": JSON_SCHEMA,
            "needed_from": hints.needed_from(),
            "orders": [dict(order) for order in hints.describe()],
        }

    def config(self) -> documents.Json:
        """`.stepfs/config.json`: effective options, and the facts by which `stepfs unmount` finds this process."""
        return {
            "schema": JSON_SCHEMA,
            "options": self.options.redacted(),  # type: ignore[dict-item]
            "lake_id": self.lake.log.identity.lake_id,
            "directory": str(self.options.directory),
            "grid": self.lake.log.identity.grid.document(),  # type: ignore[dict-item]
            "world": self.ranks.world,
            "micro_batches": self.ranks.micro_batches,
            "memory_bytes": self.machine.memory_bytes,
            "disk_bytes": self.machine.disk_bytes,
            "cache_dir": str(self.machine.cache_dir),
            "device": self.machine.device,
            "kernel": dict(self.machine.kernel),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
        }

    def line(self) -> str:
        """One line for a supervisor's status; it changes with events, not with time."""
        trouble = self.lake.follower.trouble
        where = shown_path(self.options.directory)
        steps = f"steps {self.lake.tree.first_visible()} to {self.lake.follower.frontier}"
        return f"serving {where}, {steps}" + (f"; {trouble}" if trouble else "")

    def labels(self) -> dict[str, str]:
        """The labels that distinguish this mount's metrics from those of others."""
        options, identity = self.options, self.lake.log.identity
        return {
            "lake": redact_url(options.lake),
            "lake_id": identity.lake_id,
            "directory": shown_path(options.directory),
            "group": options.group or "",
            "version": __version__,
        }

    def gauges(self) -> dict[str, float]:
        state, last = self.lake.log.state, self.meter.last_step
        return {
            "frontier_step": state.next_step - 1,
            "first_step": self.lake.tree.first_visible(),
            "last_read_step": -1 if last is None else last,
            "sealed": float(state.sealed),
            "newest_commit_timestamp_seconds": state.time_ms / 1000,
            "poll_interval_seconds": self.lake.follower.interval_s,
            "store_up": float(self.lake.follower.trouble is None),
            "waiting_requests": self.lake.waits.waiting,
            "open_files": len(self.files),
            "known_directories": len(self.known),
            **self.lake.slices.budgets(),
            "connections_limit": self.lake.slices.connections_limit,
            "start_timestamp_seconds": self.meter.started_at,
        }
