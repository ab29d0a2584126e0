"""Consumer groups: which durable checkpoints a training run keeps, and so which steps it may still need.

What each verb makes of a group's record is here and in `retention`; how a record is written so that no reclaimer
overlooks it is in `group_sequence`. There are no leases: a group counts until it is retired (COMMIT.md, hazard 10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from stepfs.clock import Clock, SystemClock
from stepfs.errors import (
    AbsentError,
    CorruptError,
    RefusedError,
    UsageError,
    WithdrawnError,
)
from stepfs.format.ids import Step
from stepfs.format.records import (
    KEPT_CHECKPOINTS_MAX,
    ConsumerRecord,
    LakeIdentity,
    check_id,
)
from stepfs.lake import retention
from stepfs.lake.group_sequence import GroupSequence
from stepfs.lake.retention import Order
from stepfs.store.api import Store

_ROUNDS_MAX: Final = 32
_NOTHING_OPENED: Final = Step(0)


@dataclass(frozen=True, slots=True)
class Group:
    """One consumer group of one lake, by name."""

    store: Store
    identity: LakeIdentity
    name: str
    clock: Clock

    @classmethod
    def of(cls, store: Store, identity: LakeIdentity, name: str, clock: Clock | None = None) -> Group:
        """`UsageError` for a name that cannot be one."""
        return cls(store, identity, check_id(name, "group"), clock or SystemClock())

    @property
    def _records(self) -> GroupSequence:
        return GroupSequence(self.store, self.identity, self.name, self.clock)

    async def newest(self) -> tuple[int, ConsumerRecord | None]:
        """(slot, newest record); (-1, None) if the group was never registered."""
        return await self._records.newest()

    async def read(self) -> ConsumerRecord | None:
        """The newest record; None if the group was never registered."""
        return (await self.newest())[1]

    async def register(self) -> ConsumerRecord:
        """Make the group exist; it keeps every live step until its first checkpoint. Idempotent.

        What the record returned needs is there for good, whoever wrote that record.
        """
        for _ in range(_ROUNDS_MAX):
            try:
                return await self._records.write(self._records.joined, whole=True)
            except WithdrawnError:
                continue  # a reclaimer advanced meanwhile; what is live after that is still all there is
        raise RefusedError(f"group {self.name!r}: reclaimers keep moving; try again")

    async def add(self, next_step: Step, *, keep: int | None = None) -> ConsumerRecord:
        """A durable checkpoint exists that resumes at `next_step`. With `keep`, so many of those recorded last stay.

        Checkpoints beyond `next_step` do not count and stay, too: see `retention`. Raises `WithdrawnError` when steps
        it needs are reclaimed already.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"--keep {keep}: keep at least one checkpoint, or retire the group")
        return await self._reorder(lambda order: retention.add(order, next_step, keep), next_step)

    async def resumed(self, next_step: Step) -> ConsumerRecord:
        """Training goes on from the checkpoint at `next_step`, which is kept from now on if it was not.

        Nothing is dropped: one can still go back to a greater checkpoint, until the trainer has passed it with `keep`.
        Raises `WithdrawnError` when steps it needs are reclaimed already.
        """
        return await self._reorder(lambda order: retention.resume(order, next_step), next_step)

    async def _reorder(self, change_order: Callable[[Order], Order], next_step: Step) -> ConsumerRecord:
        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            base = self._records.joined(old, first_live)
            record = retention.with_order(base, change_order(base.order))
            self._check_number(len(record.kept))
            return record

        return await self._records.write(change, brings=frozenset({next_step}), fences=True)

    async def drop(self, next_step: Step) -> ConsumerRecord:
        """That checkpoint is gone. `AbsentError` if it was not kept."""
        seen = False  # a second look may find it gone by our own record, which somebody followed at once (hazard 2)

        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            nonlocal seen
            del first_live
            if old is None or old.retired or not (seen or next_step in old.kept):
                raise AbsentError(f"group {self.name!r} keeps no checkpoint with next step {next_step}")
            seen = True
            kept = frozenset(old.kept) - {next_step}
            return replace(retention.with_order(old, retention.set_to(old.order, kept)), start=old.need)

        return await self._records.write(change)

    async def replace(self, kept: frozenset[Step]) -> ConsumerRecord:
        """The kept checkpoints are exactly these now."""
        return await self.revise(lambda _: kept, brings=kept)

    async def revise(
        self,
        change_kept: Callable[[frozenset[Step]], frozenset[Step]],
        *,
        brings: frozenset[Step],
        opened: Step = _NOTHING_OPENED,
    ) -> ConsumerRecord:
        """The kept checkpoints become what `change_kept` makes of those kept now, whoever has changed them meanwhile.

        `brings`: which of them the caller vouches for. Raises `WithdrawnError`, with those that come too late.
        `opened` goes into the record together with a change, as in `note_opened`; alone it is no change.
        """

        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            base = self._records.joined(old, first_live)
            kept = change_kept(frozenset(base.kept))
            self._check_number(len(kept))
            if kept == frozenset(base.kept):
                return old or base  # a retired group is not brought back by what changes nothing
            record = retention.with_order(base, retention.set_to(base.order, kept))
            return replace(record, start=base.need, opened=max(base.opened, opened))

        return await self._records.write(change, brings=brings)

    async def note_opened(self, opened: Step, *, known: Step | None = None) -> ConsumerRecord:
        """`opened` is one past the greatest step that a reader of the group has opened: so far checkpoints are believed.

        With `known`, only if that is what the record says still: else another mount has just said it. `AbsentError` if
        there is no group.
        """

        def change(old: ConsumerRecord | None, _first_live: Step) -> ConsumerRecord:
            if old is None:
                raise self._absent()
            if old.retired or old.opened >= opened or known not in (None, old.opened):
                return old
            return replace(old, opened=opened)

        return await self._records.write(change)

    def _absent(self) -> AbsentError:
        return AbsentError(f"there is no group {self.name!r} in {self.store.url}; see `stepfs status`")

    def _check_number(self, kept: int) -> None:
        if kept > KEPT_CHECKPOINTS_MAX:
            raise UsageError(
                f"group {self.name!r} would keep {kept} checkpoints, at most {KEPT_CHECKPOINTS_MAX} can be recorded; drop old "
                "ones (--keep), or delete them"
            )

    async def retire(self) -> ConsumerRecord:
        """The run is over: the group no longer holds anything back. Idempotent."""

        def change(old: ConsumerRecord | None, _first_live: Step) -> ConsumerRecord:
            if old is None:
                raise self._absent()
            return replace(old, retired=True)

        try:
            return await self._records.write(change)
        except CorruptError:
            return await self._records.retire_damaged()
