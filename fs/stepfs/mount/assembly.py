"""One mount, put together: from options and a store to the parts that answer and the tasks that run beside them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import trio

from stepfs.checkpoints.formats import Place
from stepfs.checkpoints.next_step import NextStep
from stepfs.clock import SystemClock
from stepfs.data.disk import DiskCache
from stepfs.data.get import CONNECTIONS_MAX
from stepfs.data.pagecache import Primer
from stepfs.follow.served import ServedLake
from stepfs.format.ids import Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.log.reader import LogReader
from stepfs.mount import documents
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.fuse.notify import KernelPageCache, Withdrawal
from stepfs.mount.fuse.operations import StepOperations
from stepfs.mount.host.procfs import has_pending_signal
from stepfs.mount.options import MountOptions
from stepfs.mount.status.heartbeat import Heartbeat
from stepfs.mount.status.reports import Machine, Reports
from stepfs.store.api import Store, StoreOptions
from stepfs.store.opening import open_store
from stepfs.store.silence import Silence
from stepfs.view.names import Fixed
from stepfs.view.ranks import FileNames, hinted_slices, rank_map

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Assembly(ServedLake):
    """The parts of one mount; nothing runs until `start`. Only this file and `session` see them all."""

    def __init__(
        self,
        options: MountOptions,
        store: Store,
        log: LogReader,
        machine: Machine,
        disk: DiskCache | None = None,
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
            self,
            options,
            machine,
            meter=self.meter,
            known=self.known,
            files=self.files,
            ranks=self.names.ranks,
        )
        self.operations = self._make_operations()
        if options.group is not None:
            directory = options.watched_dir
            watched = None if directory is None else (Place.parse(directory), NextStep(options.next_step))
            self.group = self.group_follower(options.group, opened_here=lambda: self.meter.opened, checkpoints=watched)

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The metrics of this mount. Made at their first use, because prometheus_client is slow to import."""
        from stepfs.mount.status import metrics  # noqa: PLC0415

        collector = metrics.MountCollector(
            self.meter,
            self.store.counts,
            self.slices.counts,
            self.reports.gauges,
            self.waits.seconds,
            self.follower.lag_s,
            self.reports.labels(),
        )
        return metrics.registry_of(collector)

    def _render_metrics(self) -> str:
        from stepfs.mount.status import metrics  # noqa: PLC0415

        return metrics.render(self.registry)

    def _make_operations(self) -> StepOperations:
        control = Control(
            self.log,
            self.tree,
            self.waits,
            files={
                Fixed.STATUS: lambda: documents.render(self.reports.status()),
                Fixed.METRICS: self._render_metrics,
                Fixed.CONFIG: lambda: documents.render(self.reports.config()),
                Fixed.ACCESSLOG: self.meter.accesslog,
                Fixed.HINTED: lambda: documents.render(self.reports.orders()),
            },
            describe_step=self._describe_step,
            now_ms=SystemClock().now_ms(),
            prefetcher=self.prefetcher,
            opened=self.files,
        )
        return StepOperations(
            reader=self.log,
            tree=self.tree,
            names=self.names,
            slices=self.slices.reads,
            waits=self.waits,
            control=control,
            meter=self.meter,
            known=self.known,
            files=self.files,
            is_own=self._is_own,
        )

    async def start_group(self, background: trio.Nursery) -> None:
        """Follow the group's record, and write this mount's own into the fleet view."""
        if self.group is not None:
            await background.start(self.group.run)
            heartbeat = Heartbeat(
                self.store,
                self.log.identity,
                self.group.group.name,
                directory=self.options.directory,
                meter=self.meter,
                follower=self.follower,
            )
            await background.start(heartbeat.run)

    async def start(self, background: trio.Nursery) -> None:
        await background.start(self.withdrawal.run)
        await super().start(background)

    async def start_priming(self, background: trio.Nursery) -> None:
        """Start the tasks that call into this mount itself: their requests must be answered, and a guardian must watch."""
        if self.primer is not None:
            await background.start(self.primer.run)

    async def aclose(self) -> None:
        """Close all that this mount opened; the lake's own store belongs to the caller."""
        self.files.close_all()
        await self.origins.aclose()

    async def _describe_step(self, entry: StepEntry) -> str:
        return await documents.describe_step(self.store, self.log.identity.lake_id, self.log.state, entry)

    def _is_own(self, pid: int) -> bool:
        """Whether a request comes from the primer: `pid` of a FUSE request is the calling thread's id."""
        return self.primer is not None and self.primer.threads.has(pid)


def store_of(options: MountOptions, url: str, silence: Silence | None = None) -> Store:
    """A store that this mount reads."""
    store_options = StoreOptions(options.endpoint_url, CONNECTIONS_MAX, of_origin=url != options.lake)
    return open_store(url, options=store_options, silence=silence)
