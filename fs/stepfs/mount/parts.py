"""The parts of one mount: how a lake's view, its bytes and its group are tied to the kernel's requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import trio

from stepfs.checkpoints.formats import NextStep, Place
from stepfs.clock import SystemClock
from stepfs.data.disk import DiskCache
from stepfs.data.fetch import CONNECTIONS_MAX
from stepfs.data.pagecache import Primer
from stepfs.errors import StoreUnreachableError, UsageError
from stepfs.follow.served import LakeParts
from stepfs.format.ids import Step
from stepfs.lake.log.reader import LogReader
from stepfs.limits import MEMORY_BYTES_MIN, default_memory_bytes, read_memory
from stepfs.mount import status
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.fuse.kernel import KernelPageCache, LookupCounts, Withdrawal
from stepfs.mount.fuse.operations import StepOperations
from stepfs.mount.host.kernel import has_pending_signal
from stepfs.mount.options import MountOptions
from stepfs.mount.status import Heartbeat, Machine, Reports
from stepfs.store.api import Store, StoreOptions
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence
from stepfs.view.names import Fixed
from stepfs.view.ranks import FileNames, hinted_slices, rank_map

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SEEN_S: Final = 10.0  # for the store to deliver what the daemon before has seen
_DISK_BYTES: Final = 8 << 30


class MountParts(LakeParts):
    """The parts of one mount; nothing runs until `start`. Only this file and `session` see them all."""

    def __init__(
        self, options: MountOptions, store: Store, log: LogReader, machine: Machine, disk: DiskCache | None = None
    ) -> None:
        self.options = options
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
            show_last=options.show_last,
            list_latest=options.list_latest,
            has_signal=has_pending_signal,
        )
        self.meter = Meter()
        self.known = LookupCounts()
        self.files = FileTable()
        pages = KernelPageCache(options.directory, self.names)
        self.primer = Primer(self.slices, pages) if options.prime else None
        self.withdrawal = Withdrawal(self.tree, self.known, self.meter)
        self.on_left = self.withdrawal.note
        self.reports = Reports(
            self, options, machine, meter=self.meter, known=self.known, files=self.files, ranks=self.names.ranks
        )
        self.operations = self._make_operations()
        self.heartbeat: Heartbeat | None = None
        if options.group is not None:
            directory = options.watched_dir
            watched = None if directory is None else (Place.parse(directory), NextStep(options.next_step))
            self.group = self.group_follower(options.group, opened_here=lambda: self.meter.opened, checkpoints=watched)

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The metrics of this mount. Made at their first use, because prometheus_client is slow to import."""
        from stepfs.mount import metrics  # noqa: PLC0415

        collector = metrics.MountCollector(
            self.meter,
            self.store.counts,
            self.slices.counts,
            self.reports.facts,
            self.waits.seconds,
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

    def estate(self) -> dict[str, Any]:
        """What the next daemon must know to go on where this one stops, also by a death."""
        return {
            "version": self.log.state.version,
            "first_visible": self.tree.first_visible(),
            "opened": self.meter.opened,
            "last_step": self.meter.last_step,
            "sizes": [*self.operations.sizes],
            "primed": [] if self.primer is None else self.primer.estate(),
            "readers": self.prefetcher.estate(),
        }

    def inherit(self, estate: Mapping[str, Any], *, crashed: bool) -> None:
        """Before `start`: go on where the daemon before has stopped; after its death, from what it wrote shortly before."""
        first = estate.get("first_visible", self.log.first_live_step)
        self.known.add_range(Step(min(first, self.log.state.next_step)), self.log.state.next_step)
        self.withdrawal.note()
        if crashed and self.options.steps is not None:
            self.operations.sizes.doubt()
        if not estate:
            return
        if self.primer is not None:
            self.primer.inherit(estate["primed"])
        for inode in estate["sizes"]:
            self.operations.sizes.note(inode)
        if not crashed:
            self.operations.inherit(estate["open"])
        if "readers" in estate:  # else of another version: they are learned anew
            self.prefetcher.inherit(estate["readers"])  # in place of what the opens before have just taught
        self.meter.opened, self.meter.last_step = estate["opened"], estate["last_step"]

    async def see(self, version: int, within_s: float = SEEN_S) -> int:
        """Return, once all is seen here that the daemon before has shown, the version. `StoreUnreachableError`."""
        with trio.move_on_after(within_s), self.changes.listening():
            while self.log.state.version < version:
                await self.changes.next_change.wait()
            return self.log.state.version
        raise StoreUnreachableError(
            f"{self.options.directory}: the mount is as it was, because {self.store.url} did not deliver within"
            f" {within_s:g} s the steps that are shown there; check the network, then try again"
        )

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


def store_of(options: MountOptions, url: str, silence: Silence | None = None) -> Store:
    store_options = StoreOptions(options.endpoint_url, CONNECTIONS_MAX, of_origin=url != options.lake)
    return open_store(url, options=store_options, silence=silence)


def budgets(options: MountOptions) -> tuple[int, int]:
    """(bytes of memory, bytes of disk). With `--cache-dir`, `--cache-size` bounds the disk cache, else the memory."""
    asked, name = options.memory_bytes, "--memory-size"
    if options.cache_dir is None and options.cache_bytes is not None:
        if asked is not None:
            raise UsageError("without --cache-dir, --cache-size means --memory-size: give one of them")
        asked, name = options.cache_bytes, "--cache-size"
    if asked is not None and asked < MEMORY_BYTES_MIN:
        raise UsageError(
            f"{name} of {asked} bytes: give memory at least {MEMORY_BYTES_MIN >> 20}M, and a --cache-dir to keep more on"
            " disk"
        )
    memory = asked or default_memory_bytes(read_memory())
    return memory, 0 if options.cache_dir is None else options.cache_bytes or _DISK_BYTES
