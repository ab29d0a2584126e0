"""This mount's record in the fleet view: rewritten every 30 s, removed when the mount ends."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from stepfs import __version__
from stepfs.clock import SystemClock
from stepfs.errors import StepfsError
from stepfs.follow.follower import Follower
from stepfs.format.ids import Step
from stepfs.format.node import PERMILLE, NodeRecord
from stepfs.format.records import LakeIdentity
from stepfs.lake.fleet import BEAT_S, remove_node, write_node
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.redact import shown_path
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.mount")

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

    def __post_init__(self) -> None:
        self._published_at = time.perf_counter()
        self._waited_s = 0.0
        self._troubled = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled, then remove the record."""
        task_status.started()
        try:
            while True:
                await self._publish()
                await trio.sleep(BEAT_S)
        finally:
            with trio.move_on_after(_REMOVE_S, shield=True) as scope:
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
        )
