"""This mount's record in the fleet view: rewritten every 15 s, removed when the mount ends.

In a large fleet each mount writes its record, and makes its other own requests, less often (`fleet_interval`). So each
mount counts the fresh records: twice right after its start, when others may be starting with it; then with every
record if there are many mounts, and every 90 s if there are few. A LIST costs a request per 1,000 records, so above
1,000 it comes with every second record, above 2,000 with every third.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from stepfs import __version__, entropy
from stepfs.clock import SystemClock
from stepfs.errors import StepfsError
from stepfs.follow.fleet_interval import FleetInterval
from stepfs.follow.follower import Follower
from stepfs.format.ids import Step
from stepfs.format.node import PERMILLE, NodeRecord
from stepfs.format.records import LakeIdentity
from stepfs.lake.fleet import BEAT_S, FRESH_INTERVALS, count_nodes, remove_node, write_node
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.redact import shown_path
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.mount")

_SECOND_COUNT_S: Final = 2.0  # mounts that start together have written their records by then
_APART_INTERVALS: Final = FRESH_INTERVALS / 2  # a record that is late by so many intervals is still fresh
_BEATS_COUNTED_FIRST: Final = 3
_BEATS_PER_COUNT: Final = 6  # while there are few mounts
_PAGE: Final = 1000  # records that one LIST request returns
_REMOVE_S: Final = 5.0  # an unmount waits no longer for an unreachable store; readers see the record's age


@dataclass(eq=False)
class Heartbeat:
    """The record of one mount in its group."""

    store: Store
    identity: LakeIdentity
    group: str
    directory: Path
    meter: Meter
    follower: Follower
    fleet: FleetInterval

    def __post_init__(self) -> None:
        self._published_at = time.perf_counter()
        self._waited_s = 0.0
        self._troubled = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled, then remove the record."""
        task_status.started()
        try:
            for beat in itertools.count():
                if self._is_count_due(beat):
                    await self._count()
                interval_s = self.fleet.beat_s()
                next_at = trio.current_time() + interval_s
                await self._publish(interval_s)
                if beat == 0:
                    await trio.sleep(_SECOND_COUNT_S)
                    await self._count()
                    if self.fleet.is_large:  # many may have started together: spread their records
                        next_at += entropy.uniform(0.0, _APART_INTERVALS * interval_s)
                await trio.sleep_until(next_at)
        finally:
            with trio.move_on_after(_REMOVE_S, shield=True) as scope:
                await self._withdraw()
            if scope.cancelled_caught:
                _log.info("the store is away: this mount's record in the fleet view will look stale")

    def _is_count_due(self, beat: int) -> bool:
        if self.fleet.is_large:
            return beat % math.ceil(self.fleet.nodes / _PAGE) == 0
        return beat < _BEATS_COUNTED_FIRST or beat % _BEATS_PER_COUNT == 0

    async def _count(self) -> None:
        try:
            self.fleet.counted(await count_nodes(self.store, self.identity))
        except StepfsError as error:  # the follower reports an unreachable store
            _log.debug("cannot count the mounts of this lake: %s", error)

    async def _publish(self, interval_s: float) -> None:
        try:
            await write_node(self.store, self.identity, self.record(interval_s))
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

    def record(self, interval_s: float = BEAT_S) -> NodeRecord:
        """The record of this moment; the next one follows in `interval_s`. The waited time counts from the last record."""
        now, waited_s = time.perf_counter(), self.meter.waited.seconds()
        share = (waited_s - self._waited_s) / max(now - self._published_at, 1e-9)
        self._published_at, self._waited_s = now, waited_s
        last = self.meter.last_step
        return NodeRecord(
            group=self.group,
            host=socket.gethostname(),
            directory=shown_path(self.directory),
            pid=os.getpid(),
            version=__version__,
            next_step=Step(self.follower.frontier + 1),
            read_to=Step(0 if last is None else last + 1),
            waited_permille=min(PERMILLE, round(PERMILLE * share)),
            time_ms=SystemClock().now_ms(),
            interval_ms=math.ceil(1000 * interval_s),
        )
