"""Back-pressure from the trainers: how far producers may run ahead of the slowest consumer group.

Without it a producer that is faster than training fills the bucket: nothing can be reclaimed that no checkpoint has
passed. The bound is soft by what other producers commit between two of our own looks at the log, and exact for a
single producer. Groups are looked at only when the need as last seen would stop an append, and now and then for a
roll-back; a run far from its bound costs nothing.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState
from stepfs.group_records import list_groups
from stepfs.store.api import Store
from stepfs_producer.pending import Pending

_log = logging.getLogger("stepfs.producer")

LOOK_EVERY_S: Final = 1.0  # while held back
_RECENT_STEPS: Final = 32
TRUST_S: Final = 30.0  # a need seen longer ago than this is looked at again: a group may have rolled back


class Lead:
    """The bound of one producer. `steps_max`: steps beyond the need; `bytes_max`: the same in payload bytes, taking
    every committed step for an average one of this lake. None means no bound."""

    def __init__(
        self, store: Store, identity: LakeIdentity, *, steps_max: int | None, bytes_max: int | None
    ) -> None:
        self._store = store
        self._identity = identity
        self._steps_max = steps_max
        self._bytes_max = bytes_max
        self._need = Step(0)
        self._holder: str | None = None
        self._looked_s = float("-inf")
        self._said = False
        self._fork_mean_at = -1  # version
        self._fork_mean_bytes = 0.0

    @property
    def bounded(self) -> bool:
        return self._steps_max is not None or self._bytes_max is not None

    def look_due(self, head: LogState, pending: Pending, payload_bytes: int) -> bool:
        """Whether the groups must be looked at before the next append."""
        if not self.bounded:
            return False
        since_s = trio.current_time() - self._looked_s
        return since_s >= TRUST_S or (self.exceeded(head, pending, payload_bytes) and since_s >= LOOK_EVERY_S)

    def exceeded(self, head: LogState, pending: Pending, payload_bytes: int) -> bool:
        """Whether an append of this size would be too far ahead, by the need as last seen."""
        committed = max(0, head.next_step - self._need)
        if self._steps_max is not None and committed + pending.uncommitted_tgbs + 1 > self._steps_max:
            return True
        if self._bytes_max is None or committed + pending.uncommitted_tgbs == 0:
            return False  # a batch larger than the bound is made when nothing else is ahead, or never
        return (
            committed * self._mean_bytes(head) + pending.uncommitted_bytes + payload_bytes > self._bytes_max
        )

    def _mean_bytes(self, head: LogState) -> float:
        """Of a committed step. A fork's totals leave out what its parent had given up: there, of the newest steps."""
        if not head.origins:
            return head.total_bytes / head.next_step if head.next_step else 0.0
        if head.version != self._fork_mean_at and head.tail:
            recent = [entry.tgb.payload_bytes for entry in head.tail[-_RECENT_STEPS:]]
            self._fork_mean_at, self._fork_mean_bytes = head.version, sum(recent) / len(recent)
        return self._fork_mean_bytes

    async def look(self, first_live_step: Step) -> None:
        """Read the groups: one LIST and a GET for each. Without any group everything live counts as needed."""
        groups = [
            group for group in (await list_groups(self._store, self._identity)).values() if not group.retired
        ]
        slowest = min(groups, key=lambda group: group.need, default=None)
        self._need = slowest.need if slowest is not None else first_live_step
        self._holder = slowest.group if slowest is not None else None
        self._looked_s = trio.current_time()

    def say_held(self) -> None:
        """Once per stretch: why nothing moves. A warning if no trainer is there to ever move it."""
        if self._said:
            return
        self._said = True
        if self._holder is None:
            _log.warning(
                "%s: held back by max_lead, and no consumer group is registered; mount with --group or checkpoint one",
                self._store.url,
            )
        else:
            _log.info("held back by max_lead: group %r needs step %d", self._holder, self._need)

    def say_moving(self) -> None:
        """The next hold is worth saying again."""
        self._said = False
