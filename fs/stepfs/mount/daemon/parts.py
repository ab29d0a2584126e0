"""The parts of one mount: how a lake's view, its bytes and its group are tied to the kernel's requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from stepfs._internal import tracing
from stepfs._internal.clock import SystemClock
from stepfs._internal.limits import MEMORY_BYTES_MIN, default_memory_bytes, read_memory
from stepfs.checkpoints.formats import NextStep, Place
from stepfs.checkpoints.watch import WatchState
from stepfs.data.announced_orders import OrderState
from stepfs.data.disk_cache import DiskCache
from stepfs.data.fetch import CONNECTIONS_MAX
from stepfs.data.page_cache import Primer
from stepfs.data.prefetch import ReadersState
from stepfs.errors import (
    CorruptError,
    OtherHistoryError,
    RefusedError,
    StoreUnreachableError,
    UsageError,
    command,
)
from stepfs.follow.parts import GroupState, LakeParts
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import NO_VERSION, Step, Version
from stepfs.lake.log.reader import LogReader
from stepfs.mount import status
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.fuse.kernel import KernelPageCache, LookupCounts, Withdrawal
from stepfs.mount.fuse.operations import StepOperations
from stepfs.mount.host.kernel import has_pending_signal
from stepfs.mount.options import MountOptions
from stepfs.mount.state import State, taken, tell_unknown, types_of
from stepfs.mount.status import Heartbeat, LastMinute, Machine, Reports
from stepfs.store.api import Store, StoreOptions
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence
from stepfs.view.inodes import Fixed
from stepfs.view.ranks import FileNames, hinted_slices, rank_map

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger("stepfs.mount")

_ORDER: Final = "order/"  # before the names of an announced order's state
SEEN_S: Final = 10.0  # for the store to deliver what the daemon before has seen
_DISK_BYTES: Final = 8 << 30


@dataclass(frozen=True, slots=True)
class ViewState:
    """What is shown: the log's newest version, with its digest, and the steps from the first visible one on."""

    version: int | None = None
    digest: str = ""
    next_step: int = 0
    first_visible: int | None = None
    time_ms: int = 0
    astray: bool = False  # the store is known to have another history

    @property
    def end(self) -> tuple[Version, bytes] | None:
        """The newest version and its digest; None if there was none, or none is known."""
        with suppress(ValueError):
            return None if self.version is None else (Version(self.version), bytes.fromhex(self.digest))
        return None


@dataclass(frozen=True, slots=True)
class OpenedState:
    """One past the greatest step that a reader has opened."""

    opened: int = 0


@dataclass(frozen=True, slots=True)
class OpenState:
    """What a daemon leaves open to the next one that it gives the mount to."""

    stopped_s: float = 0.0  # by the machine's monotonic clock
    sizes: list[int] = field(default_factory=list)  # inodes that the kernel takes for empty
    opened: dict[str, list[int | str | None]] = field(default_factory=dict)  # handles: how often, contents

    def files(self) -> Iterator[tuple[int, int, str | None]]:
        for handle, values in self.opened.items():
            match values:
                case [int() as times, str() | None as content] if handle.isdecimal():
                    yield int(handle), times, content


@dataclass(frozen=True, slots=True)
class Former:
    """The daemon before: what it has decided, and whether it died."""

    values: Mapping[str, object]
    crashed: bool

    def __post_init__(self) -> None:
        for cls in (ViewState, OpenedState, OpenState, OrderState, ReadersState, WatchState):
            types_of(cls)  # now, and not while nobody reads


class MountParts(LakeParts):
    """The parts of one mount; nothing runs until `start`. Only this file and `session` see them all."""

    def __init__(
        self,
        options: MountOptions,
        store: Store,
        log: LogReader,
        machine: Machine,
        disk: DiskCache | None = None,
        *,
        state: State,
        former: Former | None = None,
    ) -> None:
        """`former`: of the daemon before, if there is one; its state is `state`, too."""
        self.options = options
        self.state = state
        self._former = former
        self._follows_group = False  # the one that the daemon before has had
        self._shown = NO_VERSION  # the version that the daemon before has shown last
        self.machine = machine
        self.names = FileNames(rank_map(log.identity.grid, world=options.world, mesh=options.mesh), log.identity.ext)
        super().__init__(
            options,
            store,
            log,
            memory_bytes=machine.memory_bytes,
            open_origin=lambda url: store_of(options, url),
            hinted=hinted_slices(options.ranks or (), self.names.ranks),
            mounts=self.names.ranks.world // len(options.ranks) if options.ranks else 1,
            start=None if options.steps is None else Step(options.steps.start),
            disk=disk,
            opened_are_kept=options.group is not None,
            peers=self.names.ranks.peers_of(options.ranks or ()),
            has_signal=has_pending_signal,
        )
        self.meter = Meter()
        self.known = LookupCounts()
        self.files = FileTable()
        pages = KernelPageCache(options.directory, self.names)
        self.primer = Primer(self.slices, pages, state.primed) if options.prime else None
        self.withdrawal = Withdrawal(self.tree, self.known, self.meter)
        self.on_left = self.withdrawal.note
        ledger = self.slices.ledger
        ledger.pulse.now = time.monotonic  # requests wait on while the process is stopped
        self.minute = LastMinute(ledger.sums, lambda: self.meter.opened, lambda: log.state.next_step)
        self.reports = Reports(
            self, options, machine, meter=self.meter, known=self.known, files=self.files, ranks=self.names.ranks,
            minute=self.minute,
        )  # fmt: skip
        self.operations = self._make_operations()
        self.heartbeat: Heartbeat | None = None
        self.meter.on_opened = self._decide_opened
        self.prefetcher.hints.decide = lambda orders: state.decide({_ORDER + name: one for name, one in orders.items()})
        if options.group is not None:
            directory = options.watched_dir
            watched = None if directory is None else (Place.parse(directory), NextStep(options.next_step))
            self.group = self.group_follower(
                options.group,
                opened_here=lambda: self.meter.opened,
                checkpoints=watched,
                decide=self.state.decide,
            )

    async def register(self) -> str | None:
        """As of all parts; but a daemon that follows another one registers no group that this one has had."""
        before = self._former
        if before is None or self.group is None:
            return await super().register()
        known = taken(GroupState, before.values.get("group"))
        if not before.crashed and known.name != self.options.group:
            return await super().register()
        await self.group.go_on(known)
        self._follows_group = True
        return None

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The metrics of this mount. Made at their first use, because prometheus_client is slow to import."""
        from stepfs.mount import metrics  # noqa: PLC0415

        collector = metrics.MountCollector(
            self.meter,
            self.store.counts,
            self.slices.counts,
            self.reports.facts,
            self.slices.ledger.durations,
            self.follower.lag_s,
            self.reports.labels(),
        )
        return metrics.registry_of(collector)

    def _render_metrics(self) -> str:
        from stepfs.mount import metrics  # noqa: PLC0415

        return metrics.render(self.registry)

    def _make_operations(self) -> StepOperations:
        control = Control(
            self.log,
            self.tree,
            self.waits,
            files={
                Fixed.STATUS: lambda: status.render(self.reports.status()),
                Fixed.METRICS: self._render_metrics,
                Fixed.CONFIG: lambda: status.render(self.reports.config()),
                Fixed.ACCESSLOG: self.meter.accesslog,
                Fixed.TRACE: tracing.wanted,
                Fixed.HINTED: lambda: status.render(self.reports.orders()),
            },
            describe_step=lambda entry: status.describe_step(
                self.store, self.log.identity.lake_id, self.log.state, entry
            ),
            now_ms=SystemClock().now_ms(),
            prefetcher=self.prefetcher,
            opened=self.files,
        )
        return StepOperations(
            reader=self.log,
            tree=self.tree,
            names=self.names,
            slices=self.slices,
            waits=self.waits,
            control=control,
            meter=self.meter,
            known=self.known,
            files=self.files,
            is_own=self._is_own,
        )

    def answered(self) -> int:
        return self.meter.reading()

    def note_beat(self) -> None:
        super().note_beat()
        self.minute.note()

    def changed(self) -> None:
        """Put on record what is shown from now on, before anybody hears of it."""
        self._decide_view()
        super().changed()

    def _decide_view(self) -> None:
        state = self.log.state
        first, astray = self.tree.first_visible(), self.log.astray is not None
        view = ViewState(state.version, state.digest.hex(), state.next_step, first, state.time_ms, astray)
        self.state.decide({"view": _values_of(view)})

    def _decide_opened(self) -> None:
        self.state.decide({"opened": {"opened": self.meter.opened}})

    def readers(self) -> dict[str, object]:
        """What only warms, for `State.note`."""
        return {"last_step": self.meter.last_step, **_values_of(self.prefetcher.state())}

    def hand_over(self) -> None:
        """This daemon reads no request any more: put on record all that the next one needs."""
        self.prefetcher.hints.settle()
        opened = {f"{handle}": [times, content] for handle, times, content in self.files.estate()}
        if self.group is not None:
            self.group.rest(True)
        self.state.close(_values_of(OpenState(time.monotonic(), [*self.operations.sizes], opened)))

    def take_back(self) -> None:
        """No other daemon serves: this one goes on."""
        self.state.begin()
        if self.group is not None:
            self.group.rest(False)
        if self.primer is not None:
            self.primer.put_again()

    def inherit(self, *, crashed: bool) -> OpenState:
        """Before `start`: go on where the daemon before has stopped; after its death, from what is on record."""
        decided = self.state.read()
        noted, opened = self.state.read_noted(), OpenState() if crashed else taken(OpenState, self.state.read_open())
        if self.group is not None and self._follows_group:
            self.state.adopt({"watch": decided.get("watch")})
            self.group.watch_on(taken(WatchState, decided.get("watch")))
        known = {"group", "watch", "opened", "view"}
        tell_unknown(name for name in decided if name not in known and not name.startswith(_ORDER))
        view = taken(ViewState, decided.get("view"))
        first = min(view.first_visible or self.log.first_live_step, self.log.state.next_step)
        self.known.add_range(Step(first), self.log.state.next_step)
        self.withdrawal.note()
        if crashed and self.options.steps is not None:
            self.operations.sizes.doubt()
        if self.primer is not None:
            self.primer.inherit()
        for inode in opened.sizes:
            self.operations.sizes.note(inode)
        self.operations.inherit(opened.files())
        orders = {
            name.removeprefix(_ORDER): taken(OrderState, value)
            for name, value in decided.items()
            if name.startswith(_ORDER)
        }
        last_step = noted.pop("last_step", None)
        self.prefetcher.inherit(
            taken(ReadersState, noted), orders
        )  # in place of what the opens before have just taught
        self.meter.opened = Step(taken(OpenedState, decided.get("opened")).opened)
        self.meter.last_step = Step(last_step) if isinstance(last_step, int) else None
        self._decide_opened()
        self._shown = NO_VERSION if view.version is None else Version(view.version)
        return opened

    def begin(self) -> None:
        """Be the daemon that serves, and that writes the state."""
        self._decide_view()
        self.state.begin()
        if self.primer is None:
            self.state.primed.write([])

    async def see(self, version: int, within_s: float = SEEN_S) -> int:
        """Return, once all is seen here that the daemon before has shown, the version. `StoreUnreachableError`; `RefusedError`
        if it shows another history than the store has by now.
        """
        await self._follow_to(version, within_s)
        view = taken(ViewState, self.state.read().get("view"))
        if view.end is not None:
            try:
                await self.log.check_shown(*view.end)
            except OtherHistoryError as error:
                raise _not_replaced(self.options.directory, error) from error
        return self.log.state.version

    async def _follow_to(self, version: int, within_s: float) -> None:
        with trio.move_on_after(within_s), self.changes.listening():
            while self.log.state.version < version:
                await self.changes.next_change.wait()
            return
        raise StoreUnreachableError(
            f"{self.options.directory}: the mount is as it was, because {self.store.url} did not deliver within"
            f" {within_s:g} s the steps that are shown there; check the network, then try again"
        )

    async def see_all(self, within_s: float) -> None:
        """As `see`, of what the daemon before had shown when it stopped; that is of the same history. While nobody reads,
        nobody asks the store for what is there.
        """
        await self._follow_to(self._shown, within_s)

    async def start_group(self, background: trio.Nursery) -> None:
        """Follow the group's record, and write this mount's own into the fleet view."""
        if self.group is not None:
            await background.start(self.group.run)
            self.heartbeat = heartbeat = Heartbeat(
                self.store,
                self.log.identity,
                self.group.group.name,
                directory=self.options.directory,
                facts=self.reports.facts,
                sums=self.slices.ledger.sums,
                has_read=lambda: self.meter.last_step is not None,
            )
            await background.start(heartbeat.run)

    async def start(self, background: trio.Nursery) -> None:
        await background.start(self.withdrawal.run)
        await super().start(background)

    async def aclose(self) -> None:
        """Close all that this mount opened; the lake's own store belongs to the caller."""
        self.files.close_all()
        await self.close_stores()

    def _is_own(self, pid: int) -> bool:
        """Whether a request comes from the primer: `pid` of a FUSE request is the calling thread's id."""
        return self.primer is not None and self.primer.threads.has(pid)


def _values_of(state: ViewState | OpenState | ReadersState) -> dict[str, object]:
    """As `asdict`, which would copy each list on the way."""
    return {one.name: getattr(state, one.name) for one in fields(state)}


async def log_of(options: MountOptions, store: Store, identity: LakeIdentity, before: Former | None) -> LogReader:
    """The lake's log. If a daemon before has shown another one, `RefusedError` while that one serves; after its death one
    that says so, for names and pages of its steps are in the kernel.
    """
    view = ViewState() if before is None else taken(ViewState, before.values.get("view"))
    try:
        log = await LogReader.open(store, identity, reads_only=True)
        if view.end is not None:
            await log.check_shown(*view.end, noticed=view.astray)
    except CorruptError as error:
        if before is None or view.end is None:
            raise
        if not before.crashed and isinstance(error, OtherHistoryError):
            raise _not_replaced(options.directory, error) from error
        if not before.crashed:
            raise
        _log.warning("%s: what is cached stays readable, all else is EIO: %s", options.directory, error)
        steps = Step(view.first_visible or 0), Step(view.next_step)
        return LogReader.standing_in(store, identity, *view.end, steps, view.time_ms)
    return log


def _not_replaced(directory: Path, error: OtherHistoryError) -> RefusedError:
    unmount = command("stepfs", "unmount", directory)
    return RefusedError(f"{directory} shows steps that the lake has lost: `{unmount}`, and mount again ({error})")


def store_of(options: MountOptions, url: str, silence: Silence | None = None) -> Store:
    store_options = StoreOptions(options.endpoint_url, CONNECTIONS_MAX, of_origin=url != options.lake)
    return open_store(url, options=store_options, silence=silence)


def budgets(options: MountOptions) -> tuple[int, int]:
    """(bytes of memory, bytes of disk)."""
    asked = options.memory_bytes
    if options.cache_dir is None and options.cache_bytes is not None:
        raise UsageError(
            "--cache-size bounds the disk of --cache-dir: name that, or write --memory for the slices in memory"
        )
    if asked is not None and asked < MEMORY_BYTES_MIN:
        raise UsageError(
            f"--memory of {asked} bytes: give at least {MEMORY_BYTES_MIN >> 20}M, and a --cache-dir to keep more on disk"
        )
    memory = asked or default_memory_bytes(read_memory())
    return memory, 0 if options.cache_dir is None else options.cache_bytes or _DISK_BYTES
