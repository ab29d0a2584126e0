"""What many tests do with a lake: reclaim it once, look at its groups."""

from __future__ import annotations

from collections.abc import Mapping

from stepfs._internal.clock import Clock
from stepfs.format.control import GroupRecord
from stepfs.format.identity import LakeIdentity
from stepfs.lake.control import Control
from stepfs.lake.origins import OriginStores
from stepfs.lake.reclaim.run import Reclaimer, Report
from stepfs.store.api import Store


async def reclaim(
    store: Store,
    identity: LakeIdentity,
    *,
    origins: OriginStores | None = None,
    dry_run: bool = False,
    max_percent: float = 100.0,
    clock: Clock | None = None,
    grace_s: float = 0.0,
    orphans: bool = False,
) -> Report:
    """One run of a `Reclaimer`."""
    reclaimer = Reclaimer(store, identity, origins=origins, max_percent=max_percent, clock=clock, grace_s=grace_s)
    return await reclaimer.run(dry_run=dry_run, orphans=orphans)


async def list_groups(store: Store, identity: LakeIdentity) -> Mapping[str, GroupRecord]:
    """The live groups of a lake, by name."""
    control = Control(store, identity)
    await control.refresh()
    return control.groups
