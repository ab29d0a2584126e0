"""Whether a store keeps what is overwritten or deleted: advice for whoever owns the bucket, so no verb of `Store`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from stepfs.store.api import Store


@runtime_checkable
class Versionable(Protocol):
    """A store that can tell; a directory keeps nothing."""

    async def keeps_versions(self) -> bool:
        """False also if the store does not say. Never raises for the store's sake."""
        ...


async def keeps_versions(store: Store) -> bool:
    """Whether space is freed only by a rule of the bucket's own."""
    return isinstance(store, Versionable) and await store.keeps_versions()
