"""A lake's control sequence, changed by a test in place of a reclaimer, or of a store that rots."""

from __future__ import annotations

from doubles.faulty_store import ObjectMap
from doubles.trio_clock import TrioClock

from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step, Version
from stepfs.format.keys import control_prefix, number_of, numbered
from stepfs.lake.control import Control
from stepfs.lake.decisions import Advance
from stepfs.store.api import Store


async def newest_control(store: Store, identity: LakeIdentity) -> Control:
    """The sequence at its newest record."""
    control = Control(store, identity, TrioClock())
    await control.refresh()
    return control


async def reclaimed_below(store: Store, identity: LakeIdentity, step: int) -> None:
    """A reclaimer gives the steps below `step` up."""
    control = await newest_control(store, identity)
    assert await control.advance(Advance(Step(step), Version(control.floor), 0))


def control_keys(shared: ObjectMap, identity: LakeIdentity) -> list[str]:
    """The names of all control records, oldest first."""
    prefix = control_prefix(identity.lake_id)
    keys = sorted(key for key in shared.objects if key.startswith(prefix))
    assert [number_of(prefix, key) for key in keys] == list(range(len(keys)))
    assert not keys or keys[-1] == numbered(prefix, len(keys) - 1)
    return keys
