"""Back-pressure: a bound on the lead of producers over the slowest consumer group, and one on the bytes that are live.

A bound is exact for a single producer; other producers may exceed it by their commits between two of our own reads of
the log. Groups are read only when the last known need would stop an append, and sometimes to notice a roll-back.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs.errors import command
from stepfs.format.ids import Step
from stepfs.format.snapshot import LogState
from stepfs.lake.control import Control
from stepfs.lake.fork import only_holds
from stepfs_producer.commit.uploads import CommitWindow

_log = logging.getLogger("stepfs.producer")

LOOK_S_MIN: Final = 1.0  # between looks while held back; doubles while nothing changes
LOOK_S_MAX: Final = 30.0
LOOK_JITTER: Final = 0.25
SAY_AFTER_S: Final = 10.0  # of a hold; a person may have to end it
SAY_EVERY_S: Final = 60.0
TRUST_S: Final = 30.0  # an older need is read again: a group may have rolled back


class BackPressure:
    """The bounds of one producer; None: no bound. `steps_max`: steps beyond the need, or beyond the slowest run of those that
    record their pace, if any does. Groups that only hold data do not count: they wait for no step. `without_groups`: it
    holds, counted from the first live step, although no consumer group is registered that could end a wait.

    `live_bytes_max`: payload bytes that are committed and not reclaimed, a fork's inherited ones too. It holds in any
    case, and takes no request while it is kept: each commit reads the control record that counts deleted bytes.
    """

    def __init__(
        self,
        control: Control,
        *,
        steps_max: int | None,
        live_bytes_max: int | None = None,
        without_groups: bool = True,
    ) -> None:
        self._control = control
        self._steps_max = steps_max
        self._live_bytes_max = live_bytes_max
        self._without_groups = without_groups
        self._said_unbounded = False
        self._need = Step(0)
        self._holder: str | None = None
        self._known = False  # need and group are known
        self._look_at_s = float("-inf")  # time of the next look, at the earliest
        self._trusted_until_s = float("-inf")
        self._pause_s = LOOK_S_MIN
        # A hold waits for a change of it: the group and its need, or the bytes that reclaim deleted.
        self._moves: object = None
        self._held = False
        self._held_since_s = self._say_at_s = float("inf")
        self._is_full = False  # held by `live_bytes_max`

    def look_due(self, head: LogState, pending: CommitWindow, payload_bytes: int) -> bool:
        now_s = trio.current_time()
        return (self._steps_max is not None and now_s >= self._trusted_until_s) or (
            now_s >= self._look_at_s and self.exceeded(head, pending, payload_bytes)
        )

    @property
    def pause_s(self) -> float:
        until_s = min(self._look_at_s, self._trusted_until_s) if self._steps_max is not None else self._look_at_s
        return max(0.0, min(until_s, self._say_at_s) - trio.current_time())

    def exceeded(self, head: LogState, pending: CommitWindow, payload_bytes: int) -> bool:
        """Whether an append of this size would be too far ahead of the last known need, or too much."""
        self._is_full = self._fills(head, pending, payload_bytes)
        if self._is_full:
            return True
        if not self._is_over(head, pending):
            return False
        if self._without_groups or not self._known or self._holder is not None:
            return True
        self._note_unbounded()
        return False

    def _fills(self, head: LogState, pending: CommitWindow, payload_bytes: int) -> bool:
        if self._live_bytes_max is None:
            return False
        ahead = self._live_bytes(head) + pending.uncommitted_bytes
        # A batch larger than the bound may stand alone.
        return ahead > 0 and ahead + payload_bytes > self._live_bytes_max

    def _live_bytes(self, head: LogState) -> int:
        """Known to be live. Not below 0: `head` may be older than the record, which then counts what `head` lacks."""
        return max(0, head.total_bytes - self._control.record.deleted_bytes)

    def _is_over(self, head: LogState, pending: CommitWindow) -> bool:
        committed = max(0, head.next_step - self._need)
        return self._steps_max is not None and committed + pending.uncommitted_tgbs + 1 > self._steps_max

    async def look(self) -> None:
        """Read the groups. Without any group all live steps count as needed."""
        await self._control.refresh()
        now_s = trio.current_time()
        holder, need = self._slowest(forks=False)
        moves = self._control.record.deleted_bytes if self._is_full else (holder, need)
        if moves != self._moves:
            self._moves = moves
            self._pause_s = LOOK_S_MIN
        elif self._held:
            self._pause_s = min(LOOK_S_MAX, 2.0 * self._pause_s)
        self._holder, self._need, self._known = holder, need, True
        jitter = entropy.uniform(1.0 - LOOK_JITTER, 1.0 + LOOK_JITTER)
        self._look_at_s = now_s + self._pause_s * jitter
        self._trusted_until_s = now_s + TRUST_S * (1.0 + LOOK_JITTER) * jitter

    def _slowest(self, *, forks: bool) -> tuple[str | None, Step]:
        """The group that needs the earliest step, and that step. Forks hold bytes, but no lead."""
        record = self._control.record
        groups = {name: group for name, group in record.holding.items() if forks or not only_holds(name, group)}
        if not forks and record.paces:
            groups = record.paces
        slowest = min(groups, key=lambda name: groups[name].need, default=None)
        return slowest, self._control.first_live_step if slowest is None else groups[slowest].need

    def steps_ahead(self, head: LogState) -> int | None:
        """The committed steps that the slowest group still needs, by the last look; None if no group is known."""
        return None if self._holder is None else max(0, head.next_step - self._need)

    @property
    def _bound(self) -> str:
        if self._is_full:
            return f"max_live_bytes ({self._live_bytes_max})"
        return f"max_lead ({self._steps_max})"

    def _note_unbounded(self) -> None:
        if self._said_unbounded:
            return
        self._said_unbounded = True
        _log.warning(
            "%s: no consumer group is registered, so nothing bounds how far this producer runs ahead; mount with --group, "
            "and it keeps within %s of the slowest group",
            self._control.store.url,
            self._bound,
        )

    @property
    def is_held(self) -> bool:
        """Whether an append waits for a group or for room."""
        return self._held

    def note_held(self, head: LogState, pending: CommitWindow) -> None:
        """Note that no append is admitted; after `SAY_AFTER_S`, then each `SAY_EVERY_S`, warn what would end the wait."""
        now_s = trio.current_time()
        if not self._held:
            self._held, self._held_since_s, self._say_at_s = True, now_s, now_s + SAY_AFTER_S
        if now_s >= self._say_at_s and self._known:
            self._say_at_s = now_s + SAY_EVERY_S
            held_s = now_s - self._held_since_s
            own = self._what_is_not_committed(head, pending)
            what = own or self._what_ends_it(head)
            _log.warning("%s: held back by %s for %.0f s: %s", self._control.store.url, self._bound, held_s, what)

    def _what_is_not_committed(self, head: LogState, pending: CommitWindow) -> str:
        """What holds if no group does, but appends of this process; '' if a group would hold without them."""
        if self._is_full or self._steps_max is None or max(0, head.next_step - self._need) >= self._steps_max:
            return ""
        open_ticket = pending.certain_seq < pending.next_seq
        first = f"; all wait for ticket {pending.certain_seq}, which is not settled" if open_ticket else ""
        return f"{pending.uncommitted_tgbs} appends of this process are not committed yet{first}"

    def _what_ends_it(self, head: LogState) -> str:
        """The group that holds, its checkpoint, and what to type."""
        url = self._control.store.url
        reclaims = f"; `{command('stepfs', 'reclaim', url)}` deletes what no checkpoint needs" if self._is_full else ""
        name, need = self._slowest(forks=self._is_full)
        if name is None:
            return f"no consumer group is registered; mount with --group or checkpoint one{reclaims}"
        if not self._is_full and name in self._control.record.paces:
            at = ("stepfs", "checkpoint", url, "--group", name)
            return (
                f"run {name!r} records its pace, and is at step {need}, {max(0, head.next_step - need)} steps are committed "
                f"since; let it train on, record where it is with `{command(*at, '…', '--pace')}`, or if it has ended, "
                f"`{command('stepfs', 'retire-group', url, name)}`"
            )
        kept = len(self._control.groups[name].kept)
        which = f"has {kept} checkpoints, and the oldest resumes at" if kept > 1 else "needs all from"
        says = f"group {name!r} {which} step {need}, {max(0, head.next_step - need)} steps are committed since"
        if only_holds(name, self._control.groups[name]):
            return f"{says}{reclaims}"
        at = ("stepfs", "checkpoint", url, "--group", name)
        if replica := self._control.groups[name].replica:
            return (
                f"{says}, by the runs that read the replica {replica}: see `{command('stepfs', 'status', replica)}`, and let "
                f"the slowest record a later checkpoint there; if nobody replicates to it, "
                f"`{command('stepfs', 'retire-group', url, name)}`{reclaims}"
            )
        later = f"let it record a later checkpoint with `{command(*at, '…', '--keep', 1)}`"
        drop = f", drop that one with `{command(*at, need, '--drop')}`" if kept > 1 else ""
        retire = f", or if it has ended, `{command('stepfs', 'retire-group', url, name)}`"
        return (
            f"{says}; {later}{drop}{retire}; the bound must exceed the steps between two of its checkpoints{reclaims}"
        )

    def note_moving(self) -> None:
        """Note an admitted append: the next hold is said again, and begins with short pauses."""
        if self._held:
            self._pause_s = LOOK_S_MIN
        self._held, self._say_at_s = False, float("inf")
