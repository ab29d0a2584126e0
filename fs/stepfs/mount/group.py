"""This mount's own consumer group: registered at mount, and what it needs decides what the view shows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from stepfs.checkpoints.formats import Place
from stepfs.checkpoints.next_step import NextStep
from stepfs.checkpoints.watch import Watch
from stepfs.consumers import Group
from stepfs.errors import StepfsError
from stepfs.format.keys import group_prefix, numbered
from stepfs.format.records import ConsumerRecord
from stepfs.mount.fleet_pace import FleetPace
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

INTERVAL_S: Final = 1.0
_LIST_EVERY: Final = 10  # looks; the others are one GET of the slot after the newest, a tenth of the price
_SETTLE_S: Final = 10.0


class GroupNeed:
    """Keeps `Tree.need` at the group's need, from any node's checkpoint to every mount of the group."""

    def __init__(
        self,
        group: Group,
        tree: Tree,
        on_change: Callable[[], None],
        *,
        checkpoints: tuple[Place, NextStep] | None,
        fleet: FleetPace | None = None,
    ) -> None:
        """`checkpoints`: a directory of the trainer's to follow, and what its counters mean."""
        self._fleet = fleet or FleetPace()
        self.name = group.name
        self._group = group
        self._watch: Watch | None = None
        if checkpoints is not None:
            self._watch = Watch(group, *checkpoints, changed=self._show)
        self._tree = tree
        self._on_change = on_change
        self._newest = -1  # slot of the newest record known
        self._looks = 0
        self._troubled = False

    async def register(self) -> None:
        """Make the group exist before anything is shown: from now on it keeps what the mount shows."""
        self._tree.need = (await self._group.register()).need

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the group's record, and the trainer's checkpoints, until cancelled; then settle the record."""
        try:
            async with trio.open_nursery() as nursery:
                if self._watch is not None:
                    nursery.start_soon(self._watch.run)
                nursery.start_soon(self._follow)
                task_status.started()
        finally:
            with trio.CancelScope(shield=True):
                await self._settle()

    async def _follow(self) -> None:
        while True:
            await trio.sleep(self._fleet.group_look_s(INTERVAL_S))
            try:
                await self.look()
            except StepfsError as error:
                if not self._troubled:
                    _log.warning("cannot read the record of group %r: %s", self._group.name, error)
                self._troubled = True
            else:
                self._troubled = False

    async def look(self) -> None:
        """Show the newest record if there is a newer one.

        Older slots are trimmed, so after two changes at once the next slot stays empty: a LIST now and then finds that.
        """
        self._looks += 1
        if self._newest >= 0 and self._looks % _LIST_EVERY and not await self._has_moved():
            return
        newest, record = await self._group.newest()
        if record is not None:
            self._show(record)
        self._newest = newest

    async def _has_moved(self) -> bool:
        prefix = group_prefix(self._group.identity.lake_id, self._group.name)
        return await self._group.store.get(numbered(prefix, self._newest + 1)) is not None

    async def _settle(self) -> None:
        """A checkpoint written just before the end is recorded, too: a trainer that has saved exits at once."""
        if self._watch is None:
            return
        problem = f"the store did not answer within {_SETTLE_S:g} s"
        with trio.move_on_after(_SETTLE_S):
            problem = await self._watch.last_look()
        if problem:
            _log.warning(
                "group %r: the last checkpoints may not be recorded (%s); see `stepfs checkpoint`",
                self._group.name,
                problem,
            )

    def _show(self, record: ConsumerRecord) -> None:
        """A retired group needs nothing more, and hides nothing more either."""
        if not record.retired and record.need != self._tree.need:
            self._tree.need = record.need
            self._on_change()
