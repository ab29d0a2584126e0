"""Back-pressure from the trainers: how far producers may run ahead of the slowest consumer group.

Without it a producer that is faster than training fills the bucket: nothing can be reclaimed that no checkpoint has
passed. The bound is soft by what other producers commit between two of our own looks at the log, and exact for a
single producer. Groups are looked at only when the need as last seen would stop an append, and now and then for a
roll-back; a run far from its bound costs nothing. While held back, the pauses between looks double and are jittered,
and the producers of one process share their looks.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from stepfs import entropy
from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState
from stepfs.store.api import Store
from stepfs_producer.group_looks import GroupLooks, SlowestGroup
from stepfs_producer.lead_deadlock import DeadlockCheck
from stepfs_producer.pending import Pending

_log = logging.getLogger("stepfs.producer")

LOOK_S_MIN: Final = 1.0  # between looks while held back; doubles as long as nothing moves
LOOK_S_MAX: Final = 30.0
LOOK_JITTER: Final = 0.25
_DEFERRED_S: Final = 0.5  # another producer of this process is looking
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
        self._looks = GroupLooks(store, identity)
        self._deadlock = DeadlockCheck(store, identity)
        self._need = Step(0)
        self._holder: str | None = None
        self._known = False  # both of them
        self._look_at_s = float("-inf")  # not before, though held back
        self._trusted_until_s = float("-inf")
        self._pause_s = LOOK_S_MIN
        self._still_since_s = float("-inf")  # neither the need nor this producer has moved
        self._held = False
        self._said = False
        self._said_deadlock = False
        self._fork_mean_at = -1  # version
        self._fork_mean_bytes = 0.0

    @property
    def bounded(self) -> bool:
        return self._steps_max is not None or self._bytes_max is not None

    def look_due(self, head: LogState, pending: Pending, payload_bytes: int) -> bool:
        """Whether the groups must be looked at before the next append."""
        if not self.bounded:
            return False
        now_s = trio.current_time()
        return now_s >= self._trusted_until_s or (
            now_s >= self._look_at_s and self.exceeded(head, pending, payload_bytes)
        )

    @property
    def pause_s(self) -> float:
        """Until the next look of a producer that is held back."""
        return max(0.0, min(self._look_at_s, self._trusted_until_s) - trio.current_time())

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

    async def look(self, head: LogState, first_live_step: Step) -> None:
        """Read the groups, or take what another producer of this process has read: one LIST and a GET for each.

        Without any group everything live counts as needed.
        """
        slowest = await self._looks.next()
        now_s = trio.current_time()
        if slowest is None:
            self._look_at_s = self._trusted_until_s = now_s + _DEFERRED_S
            return
        self._note(slowest, first_live_step, now_s)
        if self._held and self._holder is not None and not self._said_deadlock:
            await self._check_deadlock(self._holder, head, now_s)

    def _note(self, slowest: SlowestGroup, first_live_step: Step, now_s: float) -> None:
        need = slowest.need if slowest.name is not None else first_live_step
        if (slowest.name, need) != (self._holder, self._need):
            self._still_since_s = now_s
            self._pause_s = LOOK_S_MIN
            self._deadlock.reset()
        elif self._held:
            self._pause_s = min(LOOK_S_MAX, 2.0 * self._pause_s)
        self._holder, self._need, self._known = slowest.name, need, True
        jitter = entropy.uniform(1.0 - LOOK_JITTER, 1.0 + LOOK_JITTER)
        self._look_at_s = now_s + self._pause_s * jitter
        self._trusted_until_s = now_s + TRUST_S * (1.0 + LOOK_JITTER) * jitter

    async def _check_deadlock(self, group: str, head: LogState, now_s: float) -> None:
        if not await self._deadlock.found(group, now_s - self._still_since_s, head.next_step):
            return
        self._said_deadlock = True
        _log.warning(
            "%s: held back by max_lead (%s) for %.0f s: group %r needs step %d, and its mounts have read all %d steps since "
            "then. If its next checkpoint takes more steps than that, producers and trainer wait for each other for ever: "
            "set max_lead above the steps between two checkpoints, or record a checkpoint now",
            self._store.url,
            self._steps_max if self._steps_max is not None else f"{self._bytes_max} bytes",
            now_s - self._still_since_s,
            group,
            self._need,
            head.next_step - self._need,
        )

    def note_held(self) -> None:
        """Nothing may be appended. Logged once per stretch; a warning if no trainer is there to ever end it."""
        if not self._held:
            self._held = True
            self._still_since_s = max(self._still_since_s, trio.current_time())
        if self._said or not self._known:
            return
        self._said = True
        if self._holder is None:
            _log.warning(
                "%s: held back by max_lead, and no consumer group is registered; mount with --group or checkpoint one",
                self._store.url,
            )
        else:
            _log.info("held back by max_lead: group %r needs step %d", self._holder, self._need)

    def note_moving(self) -> None:
        """The next hold is worth logging again, and begins with short pauses."""
        if self._held:
            self._pause_s = LOOK_S_MIN
            self._deadlock.reset()
        self._held = self._said = False
