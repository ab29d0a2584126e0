"""One mount, put together: from options and a store to the parts that answer and the tasks that run beside them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import trio

from stepfs.checkpoints.formats import Place
from stepfs.checkpoints.next_step import NextStep
from stepfs.clock import SystemClock
from stepfs.data.cache.disk import DiskCache
from stepfs.data.fetch.concurrency import CONNECTIONS_MAX, ConcurrencyLimit
from stepfs.data.memory.pressure import MemoryGovernor
from stepfs.data.pagecache.primer import Primer
from stepfs.data.prefetch.prefetcher import Prefetcher
from stepfs.data.slices import Slices
from stepfs.follow.changes import Changes
from stepfs.follow.committed_steps import CommittedSteps
from stepfs.follow.consumer_group import GroupFollower
from stepfs.follow.fleet_interval import FleetInterval
from stepfs.follow.follower import Follower
from stepfs.follow.waits import Waits
from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import StepEntry
from stepfs.lake.groups import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.mount import documents
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.lookup_counts import LookupCounts
from stepfs.mount.fuse.meter import Meter
from stepfs.mount.fuse.notify import KernelPageCache, Withdrawal
from stepfs.mount.fuse.operations import Parts, StepOperations
from stepfs.mount.fuse.order_directory import OrderDirectory
from stepfs.mount.host.procfs import has_pending_signal
from stepfs.mount.options import MountOptions
from stepfs.mount.status.heartbeat import Heartbeat
from stepfs.mount.status.reports import Machine, ReportedParts, Reports
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.store.options import StoreOptions
from stepfs.store.silence import Silence
from stepfs.view.file_names import FileNames
from stepfs.view.inodes import Fixed
from stepfs.view.ranks import RankMap, rank_map
from stepfs.view.selection import hinted_slices
from stepfs.view.tree import Tree, ViewOptions

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Assembly:
    """The parts of one mount; nothing runs until `start`. Only this file and `session` see them all."""

    def __init__(
        self,
        options: MountOptions,
        store: Store,
        reader: LogReader,
        machine: Machine,
        disk: DiskCache | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.reader = reader
        reader.segments.in_thread = True
        self.machine = machine
        self.meter = Meter()
        self.known = LookupCounts()
        self.files = FileTable()
        self.changes = Changes()
        self.names = FileNames(ranks_of(options, reader.identity), reader.identity.ext)
        self.tree = _tree_of(options, reader)
        self.origins = OriginStores(store, lambda url: store_of(options, url))
        self.slices = self._make_slices(disk)
        self.prefetcher = self._make_prefetcher()
        self.slices.reads.on_reading = self.prefetcher.note_open
        pages = KernelPageCache(options.directory, self.names)
        self.primer = Primer(self.slices, pages) if options.prime else None
        self.waits = Waits(
            self.tree,
            reader,
            self.changes,
            deadline_s=options.deadline_s,
            wait_s=options.wait_s,
            has_signal=has_pending_signal,
        )
        self.withdrawal = Withdrawal(self.tree, self.known, self.slices.forget_below, self.meter)
        self.fleet = FleetInterval(lambda: store.counts.throttled)
        self.follower = Follower(
            reader,
            self.changes,
            poll_s=options.poll_s,
            find_lake_id=self._find_lake_id,
            on_change=self.changed,
            fleet=self.fleet,
        )
        self.reports = self._make_reports()
        self.operations = self._make_operations()

    def _make_slices(self, disk: DiskCache | None) -> Slices:
        return Slices(
            self.store,
            memory_bytes=self.machine.memory_bytes,
            disk=disk,
            deadline_s=self.options.deadline_s,
            concurrency=ConcurrencyLimit(CONNECTIONS_MAX),
            origin_store=self._origin_store,
            opened_are_kept=self.options.group is not None,
        )

    def _make_prefetcher(self) -> Prefetcher:
        steps = self.options.steps
        return Prefetcher(
            self.slices,
            CommittedSteps(self.tree, self.reader),
            window=self.options.prefetch_steps,
            hinted=hinted_slices(self.options.ranks or (), self.names.ranks),
            start=None if steps is None else Step(steps.start),
        )

    def _make_reports(self) -> Reports:
        return Reports(
            ReportedParts(
                options=self.options,
                store=self.store,
                reader=self.reader,
                machine=self.machine,
                meter=self.meter,
                known=self.known,
                files=self.files,
                ranks=self.names.ranks,
                tree=self.tree,
                slices=self.slices,
                prefetcher=self.prefetcher,
                waits=self.waits,
                follower=self.follower,
            )
        )

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
            self.reader,
            self.tree,
            self.waits,
            files={
                Fixed.STATUS: lambda: documents.render(self.reports.status()),
                Fixed.METRICS: self._render_metrics,
                Fixed.CONFIG: lambda: documents.render(self.reports.config()),
                Fixed.ACCESSLOG: self.meter.accesslog,
            },
            describe_step=self._describe_step,
            now_ms=SystemClock().now_ms(),
            order=OrderDirectory(self.prefetcher, self.reports.orders),
        )
        return StepOperations(
            Parts(
                reader=self.reader,
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
        )

    def heartbeat(self, group: str) -> Heartbeat:
        """The record of this mount in the fleet view."""
        return Heartbeat(
            self.store,
            self.reader.identity,
            group,
            directory=self.options.directory,
            meter=self.meter,
            follower=self.follower,
            fleet=self.fleet,
        )

    def group_follower(self, name: str) -> GroupFollower:
        """The consumer group of this mount, with its checkpoint directory if it watches one."""
        options = self.options
        found = options.checkpoint_dir is not None and Place.parse(options.checkpoint_dir)
        return GroupFollower(
            Group.on(self.reader.control, name),
            self.tree,
            self.changed,
            checkpoints=(found, NextStep(options.next_step)) if found else None,
            fleet=self.fleet,
            poll_s=lambda: self.follower.pace.interval_s,
            opened_here=lambda: self.meter.opened,
            order_needs_from=self.prefetcher.hints.needed_from,
            on_retired=self.slices.reads.keep_opened,
        )

    async def start(self, background: trio.Nursery) -> None:
        """Start the tasks that the handlers rely on."""
        await background.start(self.waits.run)
        await background.start(self.slices.run)
        await background.start(MemoryGovernor(self.slices).run)
        await background.start(self.prefetcher.run)
        await background.start(self.withdrawal.run)
        await background.start(self.follower.run)

    async def start_priming(self, background: trio.Nursery) -> None:
        """Start the tasks that call into this mount itself: their requests must be answered, and a guardian must watch."""
        if self.primer is not None:
            await background.start(self.primer.run)

    async def aclose(self) -> None:
        """Close all that this mount opened; the lake's own store belongs to the caller."""
        self.files.close_all()
        await self.origins.aclose()

    def changed(self) -> None:
        """The view has changed: steps came, or left."""
        self.withdrawal.note()
        self.prefetcher.note_frontier()

    async def _describe_step(self, entry: StepEntry) -> str:
        return await documents.describe_step(
            self.store, self.reader.identity.lake_id, self.reader.state, entry
        )

    def _is_own(self, pid: int) -> bool:
        return self.primer is not None and self.primer.is_own(pid)

    async def _origin_store(self, origin: int) -> Store:
        return self.origins.open(self.reader.state.origins[origin - 1])

    async def _find_lake_id(self) -> str:
        return (await open_lake(self.store)).lake_id


def _tree_of(options: MountOptions, reader: LogReader) -> Tree:
    return Tree(reader, ViewOptions(options.steps, options.show_last, wait=options.wait_s is not None))


def store_of(options: MountOptions, url: str, silence: Silence | None = None) -> Store:
    """A store that this mount reads."""
    store_options = StoreOptions(options.endpoint_url, CONNECTIONS_MAX, of_origin=url != options.lake)
    return open_store(url, options=store_options, silence=silence)


def ranks_of(options: MountOptions, identity: LakeIdentity) -> RankMap:
    """The rank map of this lake under these options; refuses options that cannot be served."""
    return rank_map(identity.grid, world=options.world, mesh=options.mesh)
