"""Consumer groups: which durable checkpoints a training run keeps, and so which steps it may still need.

This module and `retention` define how each verb changes a group's record; `group_sequence` writes a record so that no
reclaimer overlooks it. There are no leases: a group counts until it is retired (COMMIT.md, hazard 10).
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

        The steps that the returned record needs are safe from reclaim, whichever process wrote that record.
        """
        for _ in range(_ROUNDS_MAX):
            try:
                return await self._records.write(self._records.joined, whole=True)
            except WithdrawnError:
                continue  # a reclaimer advanced meanwhile; try again with the steps that are still live
        raise RefusedError(f"group {self.name!r}: reclaimers keep moving; try again")

    async def add(self, next_step: Step, *, keep: int | None = None) -> ConsumerRecord:
        """Record a durable checkpoint that resumes at `next_step`. With `keep`, only the last `keep` recorded ones
        stay.

        Checkpoints beyond `next_step` do not count and stay, too: see `retention`. Raises `WithdrawnError` when steps
        that the checkpoint needs are reclaimed already.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"--keep {keep}: keep at least one checkpoint, or retire the group")
        return await self._reorder(lambda order: retention.add(order, next_step, keep), next_step)

    async def resumed(self, next_step: Step) -> ConsumerRecord:
        """Record that training resumed from the checkpoint at `next_step`, and keep that checkpoint from now on.

        Nothing is dropped: a trainer can still go back to a greater checkpoint, until it has passed it with `keep`.
        Raises `WithdrawnError` when steps that the checkpoint needs are reclaimed already.
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
        """Stop keeping the checkpoint at `next_step`. `AbsentError` if it was not kept."""
        seen = False  # on retry, our own earlier record may already have removed it (hazard 2)

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
        """Keep exactly these checkpoints."""
        return await self.revise(lambda _: kept, brings=kept, fences=True)

    async def revise(
        self,
        change_kept: Callable[[frozenset[Step]], frozenset[Step]],
        *,
        brings: frozenset[Step],
        opened: Step = _NOTHING_OPENED,
        revives: bool = True,
        fences: bool = False,
    ) -> ConsumerRecord:
        """Replace the kept checkpoints by `change_kept` of them, also when other writers change them meanwhile.

        `brings`: the checkpoints that the caller relies on. Raises `WithdrawnError`, with those that come too late.
        `opened` goes into the record together with a change, as in `note_opened`; alone it is no change. Unless it
        `revives`, the call leaves a retired group alone. `fences`: an earlier call of this caller, perhaps in a former
        life, may not have got its answer (`GroupSequence.write`).
        """

        def change(old: ConsumerRecord | None, first_live: Step) -> ConsumerRecord:
            if old is not None and old.retired and not revives:
                return old
            base = self._records.joined(old, first_live)
            kept = change_kept(frozenset(base.kept))
            self._check_number(len(kept))
            if kept == frozenset(base.kept):
                return old or base  # an empty change does not bring a retired group back
            record = retention.with_order(base, retention.set_to(base.order, kept))
            return replace(record, start=base.need, opened=max(base.opened, opened))

        return await self._records.write(change, brings=brings, fences=fences)

    async def note_opened(self, opened: Step, *, known: Step | None = None) -> ConsumerRecord:
        """Record `opened`, one past the greatest step that a reader of the group has opened: the limit for plausible
        checkpoints.

        With `known`, only if the record still holds that value: otherwise another mount has just updated it.
        `AbsentError` if there is no group.
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
        """End the run: the group no longer keeps any step. Idempotent."""

        def change(old: ConsumerRecord | None, _first_live: Step) -> ConsumerRecord:
            if old is None:
                raise self._absent()
            return replace(old, retired=True)

        try:
            return await self._records.write(change, fences=True)
        except CorruptError:
            return await self._records.retire_damaged()
