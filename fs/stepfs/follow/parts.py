"""A lake as it is served, by a mount or to one program: the view, its bytes, its group, and the tasks that keep them new."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from stepfs._internal import tracing
from stepfs.checkpoints.formats import NextStep, Place
from stepfs.checkpoints.watch import Progress, Watch, WatchState
from stepfs.data.disk_cache import DiskCache
from stepfs.data.fetch import CONNECTIONS_MAX, ConcurrencyLimit
from stepfs.data.memory_pressure import MemoryGovernor
from stepfs.data.prefetch import Prefetcher
from stepfs.data.slices import Slices
from stepfs.errors import StepfsError, StoreUnreachableError, UsageError, command
from stepfs.follow.changes import Changes
from stepfs.follow.follower import Follower
from stepfs.follow.polling import Spacing
from stepfs.follow.waits import HasPendingSignal, Waits
from stepfs.format.control import GroupRecord
from stepfs.format.ids import INTEGER_MAX, SliceIndex, Step
from stepfs.format.tgb import Descriptor
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import Opener, OriginStores
from stepfs.store.api import Store
from stepfs.store.local.local_store import LocalStore
from stepfs.view.tree import Tree, ViewOptions

_log = logging.getLogger("stepfs.mount")

INTERVAL_S: Final = 1.0
IDLE_S: Final = 2.0  # where no step comes and nobody waits
_SETTLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class GroupState:
    """What the next daemon of a mount knows of its group; values of JSON."""

    name: str | None = None
    need: int = 0


@dataclass(eq=False)
class GroupFollower:
    """Keeps `Tree.need` at the group's need, from any node's checkpoint to every mount of the group."""

    group: Group
    tree: Tree
    on_change: Callable[[], None]
    # The trainer's directory to follow, and the meaning of its counters.
    checkpoints: tuple[Place, NextStep] | None = None
    spacing: Spacing = field(default_factory=Spacing)
    # The present interval of looks for steps, which an idle lake lengthens: looks at the group follow it.
    poll_s: Callable[[], float] = lambda: INTERVAL_S
    opened_here: Callable[[], Step] = lambda: Step(0)  # one past the greatest step that a reader has opened here
    order_needs_from: Callable[[], Step | None] = lambda: None
    astray: Callable[[], str] = lambda: ""
    on_retired: Callable[[], None] = lambda: None  # the group keeps nothing any more
    first_live_step: Callable[[], Step] = lambda: Step(INTEGER_MAX)
    # Puts on record for the next daemon what is decided: a `GroupState` as "group", a `WatchState` as "watch".
    decide: Callable[[Mapping[str, object]], None] = lambda _: None

    def __post_init__(self) -> None:
        self._shown = False  # the group was there
        self._troubled = False
        self._watch: Watch | None = None
        if self.checkpoints is not None:
            self._watch = Watch(
                self.group,
                *self.checkpoints,
                changed=self._show,
                progress=self._progress,
                decide=lambda state: self.decide({"watch": state}),
            )

    async def register(self) -> str | None:
        """Make the group exist before the view shows anything: from now on it keeps the steps that the mount shows.

        Returns a line for people if the group is new: its name may be mistyped, and it keeps data until it is retired.
        """
        await self.group.read()
        is_new, others = self.group.known is None, sorted(self.group.control.groups)
        record = await self.group.register()
        self._shown, name = True, self.group.name
        self._need(record.need)
        if not is_new and record.need > self.first_live_step():
            return f"group {name!r} needs the steps from {record.need} on, others are not shown: another run takes a --group of its own"
        if not is_new:
            return None
        beside = f"; the lake has {', '.join(map(repr, others))}" if others else ""
        if home := self.group.control.identity.replica_of:
            leave = command("stepfs", "retire-group", home, name)
            beside += f"; if this run has read {home} before, its steps are kept there, too, and hold its producers, until {leave}"
        return f"new group {name!r}: it keeps the steps from {record.need} on until it is retired{beside}"

    async def go_on(self, state: GroupState) -> None:
        """What a daemon that follows another one does instead: to register was a person's wish, and if the group was retired
        meanwhile it stays so. A record that cannot be read is left to the looks to come.
        """
        self._shown = True
        self._need(Step(state.need))
        if self.astray():
            return
        try:
            record = await self.group.read()
        except StoreUnreachableError:
            raise
        except StepfsError as error:
            _log.warning("cannot read the record of group %r: %s", self.group.name, error)
            return
        self._show(record)

    def watch_on(self, state: WatchState) -> None:
        """Before `run`: watch the checkpoints as the daemon before would have."""
        if self._watch is not None:
            self._watch.inherit(state)

    def rest(self, rests: bool) -> None:
        """Whether another daemon watches the checkpoints."""
        if self._watch is not None:
            self._watch.rests = rests

    def _need(self, need: Step) -> None:
        self.decide({"group": {"name": self.group.name, "need": need}})
        self.tree.need = need

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the group's record, and the trainer's checkpoints, until cancelled; then record the last ones."""
        try:
            async with trio.open_nursery() as nursery:
                if self._watch is not None:
                    nursery.start_soon(self._watch.run)
                nursery.start_soon(self._follow)
                task_status.started()
        finally:
            with trio.CancelScope(shield=True):
                await self._settle()

    async def _follow(self) -> None:
        while True:
            interval_s = self.spacing.group_look_s(min(max(INTERVAL_S, self.poll_s()), IDLE_S))
            await trio.sleep(interval_s)
            try:
                if self.astray():  # the group of another history is not this one
                    pass
                elif self.group.control.looked_within(interval_s / 2):  # a look at the log has read the record
                    self._show(self.group.known)
                else:
                    await self.look()
            except StepfsError as error:
                if not self._troubled:
                    _log.warning("cannot read the record of group %r: %s", self.group.name, error)
                self._troubled = True
            else:
                self._troubled = False

    async def look(self) -> None:
        """Show the group as the newest control record has it: one GET when nothing is new."""
        self._show(await self.group.read())

    def _progress(self) -> Progress:
        return Progress(self.tree.next_step, self.opened_here(), self.order_needs_from(), self.astray())

    async def _settle(self) -> None:
        """Record the last checkpoints, which only this mount knows: a trainer exits at once after saving."""
        if self._watch is None or self._watch.rests:
            return
        problem = ""
        with trio.move_on_after(_SETTLE_S) as scope:
            problem = await self._watch.last_look()
        if scope.cancelled_caught:
            problem = f"the store did not answer within {_SETTLE_S:g} s"
        if problem:
            _log.warning(
                "group %r: the last checkpoints may not be recorded (%s); see `stepfs checkpoint`",
                self.group.name,
                problem,
            )

    def _show(self, record: GroupRecord | None) -> None:
        """Apply the group's need to the view. A retired group needs no step, and hides none."""
        if record is None:
            if self._shown:
                self.on_retired()
        elif record.need != self.tree.need or not self._shown:
            self._need(record.need)
            self.on_change()
        self._shown = record is not None


class ServeOptions(Protocol):
    """The options that `stepfs mount` and `Lake` share. Times in seconds, steps half-open."""

    @property
    def steps(self) -> range | None: ...
    @property
    def wait_s(self) -> float | None: ...
    @property
    def near(self) -> str | None: ...
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
        has_signal: HasPendingSignal | None = None,
    ) -> None:
        """`open_origin`: the store of a lake that this one was forked from, or of a nearer place. `mounts`: of the run, as far as
        is known. The others as the parts take them.
        """
        self.store = store
        self.log = log
        log.segments.in_thread = True
        view = ViewOptions(options.steps, wait=options.wait_s is not None)
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
            near=self._near_store(options.near, open_origin),
        )
        self.prefetcher = Prefetcher(
            self.slices, self.tree, log, window=options.prefetch_steps, hinted=hinted, start=start, guesses=guesses
        )
        self.slices.on_reading = self.prefetcher.note_open
        self.waits = Waits(
            self.tree, log, self.changes, deadline_s=options.deadline_s, wait_s=options.wait_s, has_signal=has_signal,
            ledger=self.slices.ledger, away_s=lambda: self.follower.away_s(),  # noqa: PLW0108 - it is made below
        )  # fmt: skip
        self.spacing = Spacing(mounts, lambda: store.counts.throttled)
        self.follower = Follower(
            log,
            self.changes,
            poll_s=options.poll_s,
            find_lake_id=self._find_lake_id,
            on_change=self.changed,
            spacing=self.spacing,
            ahead_s=self.prefetcher.ahead_s,
            asked=lambda: self.tree.asked,
        )
        self.group: GroupFollower | None = None  # of the readers here
        self.on_left: Callable[[], None] = lambda: None  # called when steps left the view
        self._follows = False

    async def register(self) -> str | None:
        """Make the group exist, if there is one, before the view shows anything; as `GroupFollower.register`."""
        return None if self.group is None else await self.group.register()

    async def start(self, background: trio.Nursery) -> None:
        """Start the tasks that reads and waits rely on."""
        governor = MemoryGovernor(self.slices)
        for part in (self.waits, self.slices, governor, self.prefetcher):
            await background.start(part.run)
        await self.follow(background)
        background.start_soon(self.slices.ledger.watch, self.answered, self.note_beat)
        if self.slices.near is not None:
            background.start_soon(self.slices.near.look, self.log.identity.lake_id)

    async def follow(self, background: trio.Nursery) -> None:
        """Look for new steps from now on. `start` does it; before that, readers are not served yet."""
        if not self._follows:
            self._follows = True
            await background.start(self.follower.run)

    def answered(self) -> int:
        """How many requests of readers were answered so far."""
        return 0

    def note_beat(self) -> None:
        """Called at each beat of the loop, several times a second while readers are at work."""
        tracing.look()

    async def close_stores(self) -> None:
        """All but the lake's own, which belongs to the caller."""
        await self.origins.aclose()
        if self.slices.near is not None:
            await self.slices.near.store.aclose()

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
        decide: Callable[[Mapping[str, object]], None] = lambda _: None,
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
            astray=lambda: str(self.log.astray or ""),
            on_retired=self.slices.keep_opened,
            first_live_step=lambda: self.log.first_live_step,
            decide=decide,
        )

    def _near_store(self, url: str | None, opener: Opener) -> Store | None:
        if url is None:
            return None
        near = opener(url)
        if near.url == self.store.url and url == os.environ.get("STEPFS_NEAR"):  # a node's default for all its lakes
            _log.warning("STEPFS_NEAR is %s, the lake itself: it is not used here", url)
            return None
        if near.url == self.store.url:
            raise UsageError(f"near is {url}, the lake itself; name a place that is nearer, or leave it out")
        if isinstance(near, LocalStore):  # NFS whose server is away must not hold an unmount
            near.abandons_reads = True
        return near

    async def _origin_store(self, tgb: Descriptor) -> Store:
        return await self.origins.of(tgb, self.log.state)

    async def _find_lake_id(self) -> str:
        return (await open_lake(self.store)).lake_id
