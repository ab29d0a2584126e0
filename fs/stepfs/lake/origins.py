"""The lakes that a lake was forked from: the stores of their TGBs, and their states that may be resumed here."""

from collections.abc import Callable, Mapping
from typing import Final

import trio

from stepfs.errors import AbsentError, RefusedError, StepfsError
from stepfs.format.commit import Origin
from stepfs.format.ids import Step
from stepfs.format.snapshot import LogState
from stepfs.format.tgb import Descriptor
from stepfs.lake.identity import open_lake
from stepfs.store.api import Store

_ANSWER_S: Final = 5.0

Opener = Callable[[str], Store]  # URL → store; opening does no I/O


class OriginLostError(RefusedError):
    """The lake that a fork shares data with is not at its URL: put it back there."""


class OriginStores:
    """The lake's own store and, opened when first needed, those of its origins, each of which is looked at once: whether
    the lake is there.
    """

    def __init__(self, store: Store, opener: Opener) -> None:
        self._own = store
        self._opener = opener
        self._others: dict[str, Store] = {}
        self._seen: set[str] = set()  # ids of lakes that were where they belong

    async def of(self, tgb: Descriptor, state: LogState) -> Store:
        """The store that holds `tgb`, a descriptor in the log of `state`. `OriginLostError` names origin and object."""
        if tgb.origin == 0:
            return self._own
        try:
            return await self.checked(state.origins[tgb.origin - 1])
        except OriginLostError as error:
            raise OriginLostError(f"{tgb.key}: {error}") from error

    async def checked(self, origin: Origin) -> Store:
        """The store of an origin; `OriginLostError` unless its lake is there."""
        store = self.open(origin)
        if origin.lake_id not in self._seen:
            try:
                lake_id = (await open_lake(store)).lake_id
                found = f"lake {lake_id} is there"
            except AbsentError:
                lake_id, found = "", "no lake is there"
            if lake_id != origin.lake_id:
                raise OriginLostError(
                    f"this fork shares steps with lake {origin.lake_id}, which belongs at {origin.url}, and {found}: put it back"
                    " there"
                )
            self._seen.add(origin.lake_id)
        return store

    async def problems(self, state: LogState, first_live: Step) -> list[str]:
        """A line for each origin that live steps may need, and that is not at its URL or does not answer soon."""
        lines, end = [], state.next_step
        for origin in state.origins:
            end = min(end, origin.end)
            if first_live >= end:
                break
            line = f"{origin.url}: the lake that this fork shares steps with does not answer"
            with trio.move_on_after(_ANSWER_S):
                try:
                    await self.checked(origin)
                except StepfsError as error:
                    line = str(error)
                else:
                    continue
            lines.append(line)
        return lines

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
    all steps of up to there.
    """
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
