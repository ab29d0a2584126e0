"""The lakes that a lake was forked from: the stores of their TGBs, and their states that may be resumed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stepfs.errors import RefusedError
from stepfs.format.commit import Origin
from stepfs.format.descriptor import Descriptor
from stepfs.format.snapshot import LogState
from stepfs.store.api import Store

Opener = Callable[[str], Store]  # URL → store; opening does no I/O


class OriginStores:
    """The lake's own store and, opened when first needed, those of its origins."""

    def __init__(self, store: Store, opener: Opener) -> None:
        self._own = store
        self._opener = opener
        self._others: dict[str, Store] = {}

    def of(self, tgb: Descriptor, state: LogState) -> Store:
        """The store that holds `tgb`, a descriptor in the log of `state`. Never waits."""
        return self._own if tgb.origin == 0 else self.open(state.origins[tgb.origin - 1])

    def open(self, origin: Origin) -> Store:
        if origin.url not in self._others:
            self._others[origin.url] = self._own if origin.url == self._own.url else self._opener(origin.url)
        return self._others[origin.url]

    async def aclose(self) -> None:
        """Close the origins' stores; the lake's own belongs to the caller."""
        for store in self._others.values():
            if store is not self._own:
                await store.aclose()
        self._others.clear()


def check_resumable(state_of: object, next_step: int, lake_id: str | None, origin_cuts: Mapping[str, int]) -> None:
    """`RefusedError` unless a state that goes on at `next_step` is of this lake, or of one that it was forked from and has
    all steps of up to there."""
    if state_of == lake_id:
        return
    cut = origin_cuts.get(state_of) if isinstance(state_of, str) else None
    if cut is None:
        raise RefusedError(f"the checkpoint was trained on lake {state_of}, here is {lake_id}: mount that lake")
    if next_step > cut:
        raise RefusedError(
            f"the checkpoint resumes at step {next_step} of lake {state_of}, of which this fork has the steps below {cut}: "
            f"resume from a checkpoint at {cut} or before"
        )
