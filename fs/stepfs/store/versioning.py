"""Whether a store keeps overwritten and deleted objects: advice for the bucket's owner, so not a verb of `Store`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from stepfs.store.api import Store


@runtime_checkable
class Versionable(Protocol):
    """A store that may keep versions; a directory never does."""

    async def keeps_versions(self) -> bool:
        """False also if the store does not answer. Never raises for a failure of the store."""
        ...


async def keeps_versions(store: Store) -> bool:
    """Whether only a lifecycle rule of the bucket frees space."""
    return isinstance(store, Versionable) and await store.keeps_versions()
