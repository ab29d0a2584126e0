"""The published state of a mount: the documents of `.stepfs/`, and its record in the fleet view."""

from __future__ import annotations

import base64
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from stepfs import __version__
from stepfs._internal.clock import SystemClock
from stepfs.errors import StepfsError
from stepfs.format.codec import Value, unpack
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import JSON_SCHEMA, SliceIndex, Step
from stepfs.format.node import PERMILLE, NodeRecord
from stepfs.format.planned import read_plan_position
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.lake.fleet import BEAT_S, remove_node, write_node
from stepfs.lake.kept_plans import commit_of
from stepfs.mount.host.kernel import process_start
from stepfs.mount.redact import redact_url, shown_path
from stepfs.store.api import Store

if TYPE_CHECKING:
    from stepfs.follow.parts import LakeParts
    from stepfs.mount.fuse.files import FileTable
    from stepfs.mount.fuse.guard import Meter
    from stepfs.mount.fuse.kernel import LookupCounts
    from stepfs.mount.options import MountOptions
    from stepfs.view.ranks import RankMap

_log = logging.getLogger("stepfs.mount")

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_FIRST_BEAT_S: Final = 4.0  # from the first step that is read to the next record; then twice as long, up to the usual
_NEWS_S: Final = 1.0  # in which the first read is noticed
_SAMPLE_S: Final = 5.0
_SAMPLES: Final = 12  # in a minute
_REMOVE_S: Final = 5.0  # an unmount waits no longer for an unreachable store; readers see the record's age


def render(document: Json) -> str:
    """One document, readable by people. A path's bytes that are not UTF-8 become `\\udc..`, as `os.fsdecode` has them."""
    return json.dumps(document, indent=2, ensure_ascii=False).encode(errors="backslashreplace").decode() + "\n"


async def describe_step(store: Store, lake_id: str, state: LogState, entry: StepEntry) -> str:
    """`steps/<step>.json`. The producer's position costs one GET; null once that log version was reclaimed."""
    commit = await commit_of(store, lake_id, entry.version)
    packed = b"" if commit is None else commit.position
    tgb = entry.tgb
    standing = read_plan_position(packed)
    slices: list[Json] = [
        {"slice": n, "offset": ref.offset, "length": ref.length, "crc32c": f"{ref.crc32c:08x}", "records": ref.records}
        for n, ref in enumerate(tgb.slice(SliceIndex(number)) for number in range(tgb.slices))
    ]
    return render(
        {
            "schema": JSON_SCHEMA,
            "step": entry.step,
            "producer": entry.producer_id,
            "epoch": entry.epoch,
            "version": entry.version,
            "time": entry.time_ms / 1000,
            "object": tgb.key,
            "origin": state.origins[tgb.origin - 1].url if tgb.origin else None,
            "size": tgb.size,
            "note": to_json(unpack(tgb.note, f"note of step {entry.step}")) if tgb.note else None,
            "slices": slices,
            "plan": None if standing is None else cast("Json", standing.document()),
            "position": to_json(unpack(packed, f"step {entry.step}")) if packed else None,
        }
    )


def to_json(value: Value) -> Json:
    """A msgpack value as JSON: bytes become {"base64": …}, keys become text."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): to_json(item) for key, item in value.items()}
    return value


@dataclass(eq=False)
class Heartbeat:
    """The record of one mount in its group."""

    store: Store
    identity: LakeIdentity
    group: str
    directory: Path
    facts: Callable[[], Mapping[str, Any]]  # `Reports.facts`
    sums: Callable[[], Mapping[str, Any]] = lambda: {"seconds": {}, "blocked_s": 0.0}  # `Ledger.sums`
    has_read: Callable[[], bool] = lambda: False  # whether a reader has opened a step

    def __post_init__(self) -> None:
        self._published_at = time.perf_counter()
        self._waited_s = 0.0
        self._sums = self.sums()
        self._troubled = False
        self.stays = False  # the record is the next daemon's

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled, then remove the record."""
        task_status.started()
        beat_s, unread = BEAT_S, True
        try:
            while True:
                await self._publish()
                due_s = trio.current_time() + beat_s
                beat_s = min(2 * beat_s, BEAT_S)
                while (left_s := due_s - trio.current_time()) > 0:
                    await trio.sleep(min(left_s, _NEWS_S) if unread else left_s)
                    if unread and self.has_read():
                        unread, beat_s = False, _FIRST_BEAT_S
                        break
        finally:
            with trio.move_on_after(_REMOVE_S, shield=True) as scope:
                if not self.stays:
                    await self._withdraw()
            if scope.cancelled_caught:
                _log.info("the store is away: this mount's record in the fleet view will look stale")

    async def _publish(self) -> None:
        try:
            await write_node(self.store, self.identity, self.record())
        except StepfsError as error:
            if not self._troubled:
                _log.info("cannot write this mount's record for the fleet view: %s", error)
            self._troubled = True
        else:
            self._troubled = False

    async def _withdraw(self) -> None:
        try:
            await remove_node(self.store, self.identity, self.record())
        except StepfsError as error:
            _log.info("cannot remove this mount's record from the fleet view: %s", error)

    def record(self) -> NodeRecord:
        """The record of this moment. The waited time counts from the last record."""
        facts, now = self.facts(), time.perf_counter()
        waited_s, last = facts["waited_s"], facts["last_step"]
        share = (waited_s - self._waited_s) / max(now - self._published_at, 1e-9)
        before, sums = self._sums, self.sums()
        causes = shares(sums, before, now - self._published_at)
        self._published_at, self._waited_s, self._sums = now, waited_s, sums
        return NodeRecord(
            group=self.group,
            host=socket.gethostname(),
            directory=shown_path(self.directory),
            pid=os.getpid(),
            version=__version__,
            next_step=Step(facts["next_step"]),
            read_to=Step(0 if last is None else last + 1),
            waited_permille=min(PERMILLE, round(PERMILLE * share)),
            causes=tuple((name, most) for name, part in causes.items() if (most := round(PERMILLE * part))),
            time_ms=SystemClock().now_ms(),
        )


def shares(sums: Mapping[str, Any], before: Mapping[str, Any], span_s: float) -> dict[str, float]:
    """The share of the time in which a reader waited, by cause, the greatest first: that of all, in proportion to the sums."""
    blocked = min(1.0, max(0.0, sums["blocked_s"] - before["blocked_s"]) / max(span_s, 1e-9))
    grown = {name: max(0.0, s - before["seconds"].get(name, 0.0)) for name, s in sums["seconds"].items()}
    total_s = sum(grown.values())
    ordered = sorted(grown.items(), key=lambda item: -item[1])
    return {name: blocked * seconds / total_s for name, seconds in ordered if total_s and seconds}


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    sums: Mapping[str, Any]
    opened: int
    next_step: int


class LastMinute:
    """What readers waited for, and how fast steps were read and committed, in the last minute."""

    def __init__(
        self, sums: Callable[[], Mapping[str, Any]], opened: Callable[[], int], next_step: Callable[[], int]
    ) -> None:
        self._sums, self._opened, self._next_step = sums, opened, next_step
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)

    def _look(self) -> _Sample:
        return _Sample(trio.current_time(), self._sums(), self._opened(), self._next_step())

    def note(self) -> None:
        """Called often; samples now and then."""
        if not self._samples or trio.current_time() - self._samples[-1].at_s >= _SAMPLE_S:
            self._samples.append(self._look())

    def document(self) -> dict[str, Json]:
        """`read_per_s` is null until a second has passed since the first read."""
        now = self._look()
        first = self._samples[0] if self._samples else now
        span_s = now.at_s - first.at_s
        reading = next((sample for sample in self._samples if sample.opened), now)
        read_s = now.at_s - reading.at_s
        return {
            "span_s": round(span_s, 3),
            "shares": {name: round(part, 6) for name, part in shares(now.sums, first.sums, span_s).items()},
            "blocked_s": round(now.sums["blocked_s"] - first.sums["blocked_s"], 6),
            "read_per_s": round((now.opened - reading.opened) / read_s, 3) if read_s >= 1 else None,
            "ahead": now.next_step - now.opened if now.opened else None,
            "committed_per_s": round((now.next_step - first.next_step) / span_s, 3) if span_s >= 1 else None,
        }


def log_place() -> str | None:
    """The file that this process logs to; None if it is none."""
    try:
        place = str(Path("/proc/self/fd/2").readlink())
    except OSError:
        return None
    return place if place.startswith("/") and not place.startswith(("/dev/", "/proc/")) else None


@dataclass(slots=True)
class Machine:
    """Facts about a mount that are known only once it stands."""

    cache_dir: Path | None
    memory_bytes: int
    disk_bytes: int
    device: str | None = None
    handovers: int = 0  # in the life of the mount
    recoveries: int = 0
    follows: int | None = None  # the pid of the daemon before
    keeper: int | None = None  # that of the mount's root process
    place: str | None = None  # the directory of its socket
    kernel: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Reports:
    """Reads all facts at each call; stores none."""

    lake: LakeParts
    options: MountOptions
    machine: Machine
    meter: Meter
    known: LookupCounts
    files: FileTable
    ranks: RankMap
    minute: LastMinute

    def facts(self) -> dict[str, Any]:
        """The facts that status.json shares with the metrics and the fleet view. Any thread may ask for them."""
        self.lake.tree.ask()
        state, follower, control = self.lake.log.state, self.lake.follower, self.lake.log.control.record
        holder = min(control.holding, key=lambda name: control.groups[name].need, default=None)
        return {
            "lake": redact_url(self.options.lake),
            "lake_id": state.lake_id,
            "frontier": follower.frontier,
            "next_step": state.next_step,
            "first_step": self.lake.tree.first_visible(),
            "sealed": state.sealed,
            "time": state.time_ms / 1000 if state.version >= 0 else None,
            "group": self.options.group,
            "live_bytes": self.lake.log.live_bytes,
            "holder": holder,
            "held_steps": 0 if holder is None else max(0, state.next_step - control.groups[holder].need),
            "store": {
                "trouble": follower.trouble,
                "upgrade_needed": self.lake.log.newer is not None,
                "poll_interval_s": round(follower.interval_s, 3),
                "connections": self.lake.slices.connections_limit,
            },
            "cache": dict(self.lake.slices.budgets()),
            "last_step": self.meter.last_step,
            "waited_s": round(self.meter.waited.seconds(), 3),
            "waiting": self.lake.waits.waiting,
            "open_files": len(self.files),
            "known_directories": len(self.known),
            "handovers": self.machine.handovers,
            "recoveries": self.machine.recoveries,
        }

    def status(self) -> Json:
        """`.stepfs/status.json`."""
        facts, state, looked = self.facts(), self.lake.log.state, self.lake.follower.looked_at
        return {
            "schema": JSON_SCHEMA,
            **facts,
            **self._shape(),
            "origins": [{"lake_id": lake_id, "cut": cut} for lake_id, cut in state.origin_cuts.items()],
            "slices": state.slices,
            "ext": self.lake.log.identity.ext,
            "head": state.version,
            "total_bytes": state.total_bytes,
            "total_records": state.total_records,
            "need": self.lake.tree.need if self.options.group is not None else None,
            "store": {
                **facts["store"],
                "reachable": facts["store"]["trouble"] is None or bool(self.lake.log.astray or self.lake.log.newer),
                "looked_s_ago": None if looked is None else round(trio.current_time() - looked, 3),
                "requests": self.lake.store.counts.requests,
                "bytes_read": self.lake.store.counts.bytes_read,
            },
            "waits": {**self.lake.slices.ledger.sums(), "last_minute": self.minute.document()},
            "waiting_for": self.lake.waits.waiting_for,
            "refused": [
                {"time": one.time_ms / 1000, "step": one.step, "error": one.error, "why": one.why}
                for one in self.lake.waits.refused
            ],
            "log": log_place(),
            "order_needs_from": self.lake.prefetcher.hints.needed_from(),
            "requests": dict(sorted(self.meter.requests.items())),
            "faults": self.meter.faults,
            "bytes_read": self.meter.bytes_read,
            "data": dict(self.lake.slices.counts.as_dict()),
            "uptime_s": round(time.time() - self.meter.started_at, 1),
        }

    def _shape(self) -> dict[str, Json]:
        """What status.json and config.json both say of steps and of this process."""
        return {
            "grid": self.lake.log.identity.grid.document(),  # type: ignore[dict-item]
            "world": self.ranks.world,
            "micro_batches": self.ranks.micro_batches,
            "pid": os.getpid(),
            "follows": self.machine.follows,
            "keeper": self.machine.keeper,
        }

    def orders(self) -> Json:
        """A file in `.stepfs/order/`: the announced order, and the first step that a checkpoint must keep for it."""
        hints = self.lake.prefetcher.hints
        return {
            "schema": JSON_SCHEMA,
            "needed_from": hints.needed_from(),
            "orders": [dict(order) for order in hints.describe()],
        }

    def config(self) -> Json:
        """`.stepfs/config.json`: effective options, and the facts by which `stepfs unmount` finds this process."""
        return {
            "schema": JSON_SCHEMA,
            "lake": redact_url(self.options.lake),
            "lake_id": self.lake.log.identity.lake_id,
            "endpoint_url": None if (url := self.options.endpoint_url) is None else redact_url(url),
            "group": self.options.group,
            "steps": None if (steps := self.options.steps) is None else [steps.start, steps.stop],
            "mesh": self.options.mesh,
            "checkpoint_dir": self.options.checkpoint_dir,
            "options": self.options.typed(),  # type: ignore[dict-item]
            "directory": str(self.options.directory),
            **self._shape(),
            "memory_bytes": self.machine.memory_bytes,
            "disk_bytes": self.machine.disk_bytes,
            "cache_dir": None if (cache := self.machine.cache_dir) is None else str(cache),
            "device": self.machine.device,
            "kernel": dict(self.machine.kernel),
            "process_start": process_start("self"),
            "keeper_place": self.machine.place,
        }

    def line(self) -> str:
        """One line for a supervisor's status; it changes with events, not with time."""
        facts = self.facts()
        trouble = facts["store"]["trouble"]
        steps = f"steps {facts['first_step']} to {facts['frontier']}"
        return f"serving {shown_path(self.options.directory)}, {steps}" + (f"; {trouble}" if trouble else "")

    def labels(self) -> dict[str, str]:
        """The labels that distinguish this mount's metrics from those of others."""
        facts = self.facts()
        return {
            "lake": facts["lake"],
            "lake_id": facts["lake_id"],
            "directory": shown_path(self.options.directory),
            "group": facts["group"] or "",
            "version": __version__,
        }
