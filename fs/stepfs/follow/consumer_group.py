"""This mount's own consumer group: registered at mount; the view hides the steps below its need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs.checkpoints.formats import NextStep, Place
from stepfs.checkpoints.watch import Progress, Watch
from stepfs.errors import StepfsError
from stepfs.follow.follower import Spacing
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

INTERVAL_S: Final = 1.0
IDLE_S: Final = 2.0  # where no step comes and nobody waits
_SETTLE_S: Final = 10.0


@dataclass(eq=False)
class GroupFollower:
    """Keeps `Tree.need` at the group's need, from any node's checkpoint to every mount of the group."""

    group: Group
    tree: Tree
    on_change: Callable[[], None]
    # The trainer's directory to follow, and the meaning of its counters.
    checkpoints: tuple[Place, NextStep] | None = None
    spacing: Spacing = field(default_factory=Spacing)
    # The present interval of looks for steps, which an idle lake lengthens: looks at the group follow it.
    poll_s: Callable[[], float] = lambda: INTERVAL_S
    opened_here: Callable[[], Step] = lambda: Step(0)  # one past the greatest step that a reader has opened here
    order_needs_from: Callable[[], Step | None] = lambda: None
    on_retired: Callable[[], None] = lambda: None  # the group keeps nothing any more

    def __post_init__(self) -> None:
        self._shown = False  # the group was there
        self._troubled = False
        self._watch: Watch | None = None
        if self.checkpoints is not None:
            self._watch = Watch(self.group, *self.checkpoints, changed=self._show, progress=self._progress)

    async def register(self) -> str | None:
        """Make the group exist before the view shows anything: from now on it keeps the steps that the mount shows.

        Returns a line for people if the group is new: its name may be mistyped, and it keeps data until it is retired.
        """
        await self.group.read()
        is_new, others = self.group.known is None, sorted(self.group.control.groups)
        record = await self.group.register()
        self._shown, self.tree.need = True, record.need
        if not is_new:
            return None
        beside = f"; the lake has {', '.join(map(repr, others))}" if others else ""
        return f"new group {self.group.name!r}: it keeps the steps from {record.need} on until it is retired{beside}"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the group's record, and the trainer's checkpoints, until cancelled; then record the last ones."""
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
            await trio.sleep(self.spacing.group_look_s(min(max(INTERVAL_S, self.poll_s()), IDLE_S)))
            try:
                await self.look()
            except StepfsError as error:
                if not self._troubled:
                    _log.warning("cannot read the record of group %r: %s", self.group.name, error)
                self._troubled = True
            else:
                self._troubled = False

    async def look(self) -> None:
        """Show the group as the newest control record has it: one GET when nothing is new."""
        self._show(await self.group.read())

    def _progress(self) -> Progress:
        return Progress(self.tree.next_step, self.opened_here(), self.order_needs_from())

    async def _settle(self) -> None:
        """Record the last checkpoints, which only this mount knows: a trainer exits at once after saving."""
        if self._watch is None:
            return
        problem = ""
        with trio.move_on_after(_SETTLE_S) as scope:
            problem = await self._watch.last_look()
        if scope.cancelled_caught:
            problem = f"the store did not answer within {_SETTLE_S:g} s"
        if problem:
            _log.warning(
                "group %r: the last checkpoints may not be recorded (%s); see `stepfs checkpoint`",
                self.group.name,
                problem,
            )

    def _show(self, record: GroupRecord | None) -> None:
        """Apply the group's need to the view. A retired group needs no step, and hides none."""
        if record is None:
            if self._shown:
                self.on_retired()
        elif record.need != self.tree.need or not self._shown:
            self.tree.need = record.need
            self.on_change()
        self._shown = record is not None
