"""Consumer groups: which durable checkpoints a training run keeps, and so which steps it may still need.

Each verb is one request on the control sequence (`control`); `decisions` defines the changes. There are no leases: a
group counts until it is retired (COMMIT.md, hazard 10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepfs.clock import Clock, SystemClock
from stepfs.errors import UsageError
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity, check_id
from stepfs.lake.control import Control
from stepfs.lake.decisions import Add, Drop, Register, Request, Resume, Retire, Revise
from stepfs.store.api import Store


@dataclass(frozen=True, slots=True)
class Group:
    """One consumer group of one lake, by name. Each verb raises what `Control.change` raises."""

    control: Control
    name: str

    @classmethod
    def of(cls, store: Store, identity: LakeIdentity, name: str, clock: Clock | None = None) -> Group:
        """With a control sequence of its own. `UsageError` for a name that cannot be one."""
        return cls.on(Control(store, identity, clock or SystemClock()), name)

    @classmethod
    def on(cls, control: Control, name: str) -> Group:
        """`UsageError` for a name that cannot be one."""
        return cls(control, check_id(name, "group"))

    @property
    def known(self) -> GroupRecord | None:
        """The group in the newest record that this process knows; None if it is not there."""
        return self.control.groups.get(self.name)

    async def read(self) -> GroupRecord | None:
        """The group in the newest record; None if it was never registered, or is retired."""
        await self.control.refresh()
        return self.known

    async def register(self, fork: str = "") -> GroupRecord:
        """Make the group exist; it keeps every live step until its first checkpoint. Idempotent.

        `fork`: the URL of the fork that holds it.
        """
        return await self._changed(Register(self.name, fork))

    async def add(self, next_step: Step, *, keep: int | None = None, creates: bool = True) -> GroupRecord:
        """Record a durable checkpoint that resumes at `next_step`. With `keep`, only the last `keep` recorded ones
        stay.

        Checkpoints beyond `next_step` do not count and stay, too: see `retention`. Raises `WithdrawnError` when steps
        that the checkpoint needs are reclaimed already, `NoSuchGroupError` if there is none and it `creates` none.
        """
        if keep is not None and keep < 1:
            raise UsageError(f"--keep {keep}: keep at least one checkpoint, or retire the group")
        return await self._changed(Add(self.name, next_step, keep, creates))

    async def resumed(self, next_step: Step, *, creates: bool = True) -> GroupRecord:
        """Record that training resumed from the checkpoint at `next_step`, and keep that checkpoint from now on.

        Nothing is dropped: a trainer can still go back to a greater checkpoint, until it has passed it with `keep`.
        Raises `WithdrawnError` when steps that the checkpoint needs are reclaimed already.
        """
        return await self._changed(Resume(self.name, next_step, creates))

    async def drop(self, next_step: Step) -> GroupRecord:
        """Stop keeping the checkpoint at `next_step`. `AbsentError` if it was not kept."""
        return await self._changed(Drop(self.name, next_step))

    async def replace(self, kept: frozenset[Step]) -> GroupRecord:
        """Keep exactly these checkpoints."""
        return await self._changed(Revise(self.name, lambda _: kept))

    async def revise(
        self,
        change: Callable[[frozenset[Step]], frozenset[Step]],
        *,
        revives: bool = True,
    ) -> GroupRecord | None:
        """Replace the kept checkpoints by `change` of them, also when other writers change them meanwhile.

        Raises `WithdrawnError` with the new checkpoints that come too late. None: the group is retired, and the call
        does not revive it.
        """
        record = await self.control.change(Revise(self.name, change, revives))
        return record.groups.get(self.name)

    async def retire(self) -> GroupRecord:
        """End the run: the group no longer keeps any step. Returns it as it was known; `AbsentError` if there is none."""
        former = self.known or GroupRecord(start=self.control.first_live_step)
        await self.control.change(Retire(self.name))
        return former

    async def _changed(self, request: Request) -> GroupRecord:
        return (await self.control.change(request)).groups[self.name]
