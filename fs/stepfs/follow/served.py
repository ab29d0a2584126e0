"""A lake as it is served, by a mount or to one program: the view, its bytes, and the tasks that keep both new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from stepfs.checkpoints.formats import NextStep, Place
from stepfs.data.disk import DiskCache
from stepfs.data.fetch import CONNECTIONS_MAX, ConcurrencyLimit
from stepfs.data.memory import MemoryGovernor
from stepfs.data.prefetch import Prefetcher
from stepfs.data.slices import Slices
from stepfs.follow.served import GroupFollower
from stepfs.follow.follower import Changes, Follower, Spacing
from stepfs.follow.waits import HasPendingSignal, Waits
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.tgb import Descriptor
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import Opener, OriginStores
from stepfs.store.api import Store
from stepfs.view.tree import Tree, ViewOptions


class ServeOptions(Protocol):
    """The options that `stepfs mount` and `Lake` share. Times in seconds, steps half-open."""

    @property
    def steps(self) -> range | None: ...
    @property
    def wait_s(self) -> float | None: ...
    @property
    def prefetch_steps(self) -> int | None: ...
    @property
    def poll_s(self) -> float: ...
    @property
    def deadline_s(self) -> float: ...


class LakeParts:
    """The parts that every way of reading has; nothing runs until `start`."""

    def __init__(
        self,
        options: ServeOptions,
        store: Store,
        log: LogReader,
        *,
        memory_bytes: int,
        open_origin: Opener,
        hinted: tuple[SliceIndex, ...],
        start: Step | None,
        guesses: bool = True,
        mounts: int = 1,
        connections: int = CONNECTIONS_MAX,
        disk: DiskCache | None = None,
        opened_are_kept: bool = False,
        peers: int = 1,
        show_last: int | None = None,
        list_latest: bool = False,
        has_signal: HasPendingSignal | None = None,
    ) -> None:
        """`open_origin`: the store of a lake that this one was forked from. `mounts`: of the run, as far as is known. The
        others as the parts take them.
        """
        self.store = store
        self.log = log
        log.segments.in_thread = True
        view = ViewOptions(options.steps, show_last, wait=options.wait_s is not None, list_latest=list_latest)
        self.tree = Tree(log, view)
        self.changes = Changes()
        self.origins = OriginStores(store, open_origin)
        self.slices = Slices(
            store,
            memory_bytes=memory_bytes,
            disk=disk,
            deadline_s=options.deadline_s,
            concurrency=ConcurrencyLimit(connections),
            origin_store=self._origin_store,
            opened_are_kept=opened_are_kept,
            peers=peers,
        )
        self.prefetcher = Prefetcher(
            self.slices,
            self.tree,
            log,
            window=options.prefetch_steps,
            hinted=hinted,
            start=start,
            guesses=guesses,
        )
        self.slices.reads.on_reading = self.prefetcher.note_open
        self.waits = Waits(
            self.tree,
            log,
            self.changes,
            deadline_s=options.deadline_s,
            wait_s=options.wait_s,
            has_signal=has_signal,
        )
        self.spacing = Spacing(mounts, lambda: store.counts.throttled)
        self.follower = Follower(
            log,
            self.changes,
            poll_s=options.poll_s,
            find_lake_id=self._find_lake_id,
            on_change=self.changed,
            spacing=self.spacing,
        )
        self.group: GroupFollower | None = None  # of the readers here
        self.on_left: Callable[[], None] = lambda: None  # called when steps left the view

    async def register(self) -> str | None:
        """Make the group exist, if there is one, before the view shows anything; as `GroupFollower.register`."""
        return None if self.group is None else await self.group.register()

    async def start(self, background: trio.Nursery) -> None:
        """Start the tasks that reads and waits rely on."""
        governor = MemoryGovernor(self.slices)
        for part in (self.waits, self.slices, governor, self.prefetcher, self.follower):
            await background.start(part.run)

    def changed(self) -> None:
        """The view has changed: steps came, or left."""
        first = self.tree.take_new_first_visible()
        if first is not None:
            self.slices.forget_below(first)
            self.on_left()
        self.prefetcher.note_frontier()

    def group_follower(
        self,
        name: str,
        *,
        opened_here: Callable[[], Step] = lambda: Step(0),
        checkpoints: tuple[Place, NextStep] | None = None,
    ) -> GroupFollower:
        """The consumer group of the readers here; the arguments as `GroupFollower` takes them."""
        return GroupFollower(
            Group.on(self.log.control, name),
            self.tree,
            self.changed,
            checkpoints=checkpoints,
            spacing=self.spacing,
            poll_s=lambda: self.follower.pace.interval_s,
            opened_here=opened_here,
            order_needs_from=self.prefetcher.hints.needed_from,
            on_retired=self.slices.reads.keep_opened,
        )

    async def _origin_store(self, tgb: Descriptor) -> Store:
        return await self.origins.of(tgb, self.log.state)

    async def _find_lake_id(self) -> str:
        return (await open_lake(self.store)).lake_id
