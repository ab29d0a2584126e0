"""What a mount tells of itself: the contents of `.stepfs/status.json` and `config.json`, and the gauges of `metrics`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import trio

from stepfs.data.prefetch.prefetcher import Prefetcher
from stepfs.data.slices import Slices
from stepfs.format.ids import JSON_SCHEMA
from stepfs.mount import documents
from stepfs.mount.follow.follower import Follower
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.fuse.waits import Waits
from stepfs.mount.host.procfs import process_start
from stepfs.mount.options import MountOptions, redact_url
from stepfs.mount.protocols import Reader
from stepfs.store.api import Store
from stepfs.view.ranks import RankMap
from stepfs.view.tree import Tree


@dataclass(slots=True)
class Machine:
    """What is known of a mount only once it stands."""

    cache_dir: Path
    memory_bytes: int
    disk_bytes: int
    device: str | None = None
    kernel: dict[str, int | None] = field(default_factory=dict)


class Reported(Protocol):
    """The parts of a mount that are reported on; `assembly.Assembly` has them."""

    options: MountOptions
    store: Store
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

    @property
    def reader(self) -> Reader: ...


class Reports:
    """Reads everything when asked; keeps nothing."""

    def __init__(self, mount: Reported) -> None:
        self._mount = mount

    def status(self) -> documents.Json:
        """`.stepfs/status.json`."""
        state, follower = self._mount.reader.state, self._mount.follower
        looked = follower.looked_at
        return {
            "schema": JSON_SCHEMA,
            "lake": self._mount.options.redacted()["lake"],  # type: ignore[dict-item]
            "lake_id": state.lake_id,
            "slices": state.slices,
            "ext": self._mount.reader.identity.ext,
            "world": self._mount.ranks.world,
            "head": state.version,
            "frontier": follower.frontier,
            "next_step": state.next_step,
            "first_step": self._mount.tree.first_visible(),
            "sealed": state.sealed,
            "time": state.time_ms / 1000 if state.version >= 0 else None,
            "total_bytes": state.total_bytes,
            "total_records": state.total_records,
            "group": self._mount.options.group,
            "need": self._mount.tree.need if self._mount.options.group is not None else None,
            "store": {
                "reachable": follower.trouble is None,
                "trouble": follower.trouble,
                "looked_s_ago": None if looked is None else round(trio.current_time() - looked, 3),
                "poll_interval_s": round(follower.interval_s, 3),
                "requests": self._mount.store.counts.requests,
                "bytes_read": self._mount.store.counts.bytes_read,
            },
            "cache": dict(self._cache()),
            "order_needs_from": self._mount.prefetcher.hints.needed_from(),
            "last_step": self._mount.meter.last_step,
            "waited_s": round(self._mount.meter.waited.seconds(), 3),
            "waiting": self._mount.waits.waiting,
            "open_files": len(self._mount.files),
            "known_directories": len(self._mount.known),
            "requests": dict(sorted(self._mount.meter.requests.items())),
            "faults": self._mount.meter.faults,
            "bytes_read": self._mount.meter.bytes_read,
            "data": dict(self._mount.slices.counts.as_dict()),
            "producers": documents.describe_producers(state),
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self._mount.meter.started_at, 1),
        }

    def orders(self) -> documents.Json:
        """A file in `.stepfs/order/`: what was announced, and what a checkpoint must keep for it."""
        hints = self._mount.prefetcher.hints
        return {
            "schema": JSON_SCHEMA,
            "needed_from": hints.needed_from(),
            "orders": [dict(order) for order in hints.describe()],
        }

    def config(self) -> documents.Json:
        """`.stepfs/config.json`: effective options, and what `stepfs unmount` needs to find this process."""
        return {
            "schema": JSON_SCHEMA,
            "options": self._mount.options.redacted(),  # type: ignore[dict-item]
            "lake_id": self._mount.reader.identity.lake_id,
            "directory": str(self._mount.options.directory),
            "world": self._mount.ranks.world,
            "memory_bytes": self._mount.machine.memory_bytes,
            "disk_bytes": self._mount.machine.disk_bytes,
            "cache_dir": str(self._mount.machine.cache_dir),
            "device": self._mount.machine.device,
            "kernel": dict(self._mount.machine.kernel),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
        }

    def line(self) -> str:
        """One line for a supervisor's status; changes when something happens, not with time."""
        mount = self._mount
        trouble = mount.follower.trouble
        steps = f"steps {mount.tree.first_visible()} to {mount.follower.frontier}"
        return f"serving {mount.options.directory}, {steps}" + (f"; {trouble}" if trouble else "")

    def labels(self) -> dict[str, str]:
        """What tells this mount's metrics from those of others."""
        options, identity = self._mount.options, self._mount.reader.identity
        return {
            "lake": redact_url(options.lake),
            "lake_id": identity.lake_id,
            "directory": str(options.directory),
            "group": options.group or "",
            "version": version("stepfs"),
        }

    def gauges(self) -> dict[str, float]:
        state, last = self._mount.reader.state, self._mount.meter.last_step
        return {
            "frontier_step": state.next_step - 1,
            "first_step": self._mount.tree.first_visible(),
            "last_read_step": -1 if last is None else last,
            "sealed": float(state.sealed),
            "newest_commit_timestamp_seconds": state.time_ms / 1000,
            "poll_interval_seconds": self._mount.follower.interval_s,
            "store_up": float(self._mount.follower.trouble is None),
            "waiting_requests": self._mount.waits.waiting,
            "open_files": len(self._mount.files),
            "known_directories": len(self._mount.known),
            **self._cache(),
            "start_timestamp_seconds": self._mount.meter.started_at,
        }

    def _cache(self) -> dict[str, int]:
        memory, disk = self._mount.slices.cache.pool, self._mount.slices.spill.disk
        return {
            "memory_bytes": memory.used,
            "memory_limit_bytes": memory.limit,
            "disk_bytes": 0 if disk is None else disk.used,
            "disk_limit_bytes": 0 if disk is None else disk.limit,
        }
