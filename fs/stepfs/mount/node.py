"""What this mount says of itself to the fleet view: every ten seconds, and no more once it has ended."""

from __future__ import annotations

import logging
import os
import socket
import time
from importlib.metadata import version
from typing import Final, Protocol

import trio

from stepfs.clock import SystemClock
from stepfs.errors import StepfsError
from stepfs.format.ids import Step
from stepfs.format.node import PERMILLE, NodeRecord
from stepfs.format.records import LakeIdentity
from stepfs.mount.follower import Follower
from stepfs.mount.meter import Meter
from stepfs.mount.options import MountOptions
from stepfs.nodes import BEAT_S, remove_node, write_node
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.mount")

_REMOVE_S: Final = 5.0  # an ending waits no longer for a store that is away; the record says how old it is


class Speaking(Protocol):
    """The parts of a mount that are spoken of; `assembly.Assembly` has them."""

    options: MountOptions
    store: Store
    meter: Meter
    follower: Follower


class Node:
    """The record of one mount in its group."""

    def __init__(self, mount: Speaking, identity: LakeIdentity, group: str) -> None:
        self._mount = mount
        self._identity = identity
        self._group = group
        self._version = version("stepfs")
        self._spoke_at = time.perf_counter()
        self._waited_s = 0.0
        self._troubled = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Speak until cancelled, then take the record away."""
        task_status.started()
        try:
            while True:
                await self._speak()
                await trio.sleep(BEAT_S)
        finally:
            with trio.move_on_after(_REMOVE_S, shield=True) as scope:
                await self._fall_silent()
            if scope.cancelled_caught:
                _log.info("the store is away: this mount's record in the fleet view will look stale")

    async def _speak(self) -> None:
        try:
            await write_node(self._mount.store, self._identity, self.record())
        except StepfsError as error:
            if not self._troubled:
                _log.info("cannot write this mount's record for the fleet view: %s", error)
            self._troubled = True
        else:
            self._troubled = False

    async def _fall_silent(self) -> None:
        try:
            await remove_node(self._mount.store, self._identity, self.record())
        except StepfsError as error:
            _log.info("cannot remove this mount's record from the fleet view: %s", error)

    def record(self) -> NodeRecord:
        """As of now; the time waited is counted since the record before."""
        now, waited_s = time.perf_counter(), self._mount.meter.waited.seconds()
        share = (waited_s - self._waited_s) / max(now - self._spoke_at, 1e-9)
        self._spoke_at, self._waited_s = now, waited_s
        last = self._mount.meter.last_step
        return NodeRecord(
            group=self._group,
            host=socket.gethostname(),
            directory=str(self._mount.options.directory),
            pid=os.getpid(),
            version=self._version,
            next_step=Step(self._mount.follower.frontier + 1),
            read_to=Step(0 if last is None else last + 1),
            waited_permille=min(PERMILLE, round(PERMILLE * share)),
            time_ms=SystemClock().now_ms(),
        )
