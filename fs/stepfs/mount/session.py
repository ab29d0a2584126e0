"""One mount from beginning to end, in this process: its parts, and their order of starting and ending.

prepare the directory → open the lake → claim a cache directory → mount → answer → READY → … → detach → clean up
"""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Final

import sdnotify
import trio

from stepfs import interruption
from stepfs.checkpoints.formats import NextStep, Place
from stepfs.clock import SystemClock
from stepfs.data.disk import DiskCache
from stepfs.data.fetch import CONNECTIONS_MAX
from stepfs.data.pagecache import Primer
from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs.follow.served import LakeParts
from stepfs.format.ids import Step
from stepfs.format.records import LakeIdentity
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.limits import MEMORY_BYTES_MIN, default_memory_bytes, read_memory
from stepfs.mount import status
from stepfs.mount.fuse import kernel
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.fuse.kernel import KernelPageCache, LookupCounts, Withdrawal, interrupted_reads
from stepfs.mount.fuse.operations import StepOperations
from stepfs.mount.health import watchdog
from stepfs.mount.health.guardian import Guardian
from stepfs.mount.health.watchdog import RunningTime
from stepfs.mount.host import cache_directory, mount_points
from stepfs.mount.host.abort import abort_handle
from stepfs.mount.host.kernel import has_pending_signal, tune
from stepfs.mount.host.mount_points import mount_at, real_directory, wait_until_detached
from stepfs.mount.options import MountOptions
from stepfs.mount.status import Heartbeat, Machine, Reports
from stepfs.store.api import Store, StoreOptions
from stepfs.store.opening import open_store
from stepfs.store.silence import Say, Silence
from stepfs.view.names import Fixed
from stepfs.view.ranks import FileNames, check_steps, hinted_slices, rank_map

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


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

    async def start_group(self, background: trio.Nursery) -> None:
        """Follow the group's record, and write this mount's own into the fleet view."""
        if self.group is not None:
            await background.start(self.group.run)
            heartbeat = Heartbeat(
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
        await self.origins.aclose()

    def _is_own(self, pid: int) -> bool:
        """Whether a request comes from the primer: `pid` of a FUSE request is the calling thread's id."""
        return self.primer is not None and self.primer.threads.has(pid)


def store_of(options: MountOptions, url: str, silence: Silence | None = None) -> Store:
    store_options = StoreOptions(options.endpoint_url, CONNECTIONS_MAX, of_origin=url != options.lake)
    return open_store(url, options=store_options, silence=silence)


_log = logging.getLogger("stepfs.mount")

_PORT_S: Final = 2.0
_PORT_RETRY_S: Final = 0.1
_LAKE_POLL_S: Final = 1.0
_DISK_BYTES: Final = 8 << 30
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Ready = Callable[[], None]


def run(
    options: MountOptions, ready: Ready = lambda: None, say: Say = _log.warning, tell: Say = lambda _: None
) -> int | None:
    """`serve` in a fresh event loop. Call in the main thread: signals are handled there."""
    faulthandler.enable()  # a supervisor ends a stuck process with SIGABRT: show its stack
    return interruption.run(serve, options, ready, say, tell, clock=RunningTime())


async def serve(options: MountOptions, ready: Ready, say: Say = _log.warning, tell: Say = lambda _: None) -> int | None:
    """Mount and serve until unmounted or signalled; returns the signal that ended it, if one did.

    `ready` is called once the mount answers a listing; until then, `say` is called with a line when the store is
    silent, and `tell` with one that is no warning. Raises `AbsentError`, `RefusedError`, `UsageError`,
    `StoreUnreachableError` before anything is mounted; afterwards only `ReplacedError`, when another lake takes this
    one's URL.
    """
    with trio.open_signal_receiver(*_ENDING) as signals:
        async with trio.open_nursery() as nursery:
            session = _Session(options, ready, Silence(say), tell)
            nursery.start_soon(session.end_on, signals)
            with watchdog.shown_on_signal(nursery):
                await session.serve()
            nursery.cancel_scope.cancel()
    return session.ended_by


class _Session:
    """Two stages: before the mount stands a signal undoes everything at once; afterwards it starts to detach.

    Two nurseries: handlers answer the kernel in the outer one until the very end, because the tasks in the inner one
    (fetching, following, withdrawing names) may hold a worker thread that waits for an answer.
    """

    def __init__(self, options: MountOptions, ready: Ready, silence: Silence, tell: Say) -> None:
        self._directory = real_directory(options.directory)
        self._descriptor = mount_points.descriptor_of(self._directory)
        prime = options.prime and self._descriptor is None  # its paths are invisible from here
        self._options = dataclasses.replace(options, directory=self._directory, prime=prime)
        self._ready = ready
        self._silence, self._tell = silence, tell
        self._opening = trio.CancelScope()
        self._background: trio.CancelScope | None = None
        self.ended_by: int | None = None
        self._why = "unmounted"
        self._abort_handle: int | None = None
        self._guardian = Guardian(self._directory)
        self._notifier = sdnotify.SystemdNotifier()

    async def end_on(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self.ended_by = number
            self._why = f"detached on {signal.Signals(number).name}"
            (self._background or self._opening).cancel()

    async def serve(self) -> None:
        with self._opening, ExitStack() as claimed:
            if self._descriptor is None:
                claimed.callback(os.close, await trio.to_thread.run_sync(mount_points.claim, self._directory))
            else:
                mount_points.check_passed(self._descriptor)
            store = store_of(self._options, self._options.lake, self._silence)
            try:
                await self._open(store, mounted=claimed.close)
            finally:
                with trio.CancelScope(shield=True):
                    await store.aclose()

    async def _identity(self, store: Store) -> LakeIdentity:
        """The lake's, which is waited for as long as the options say if it does not exist yet."""
        until, told = trio.current_time() + (self._options.wait_for_lake_s or 0.0), False
        while True:
            try:
                return await open_lake(store)
            except AbsentError:
                left_s = until - trio.current_time()
                if left_s <= 0:
                    raise
                if not told:
                    told = True
                    _log.info("waiting for a lake at %s", store.url)
                    self._tell(f"{store.url} is no lake yet; waiting up to {self._options.wait_for_lake_s:g} s for it")
                self._notifier.notify(f"EXTEND_TIMEOUT_USEC={int(left_s + _LAKE_POLL_S) * 1_000_000 + 30_000_000}")
                await trio.sleep(min(_LAKE_POLL_S, left_s))

    async def _open(self, store: Store, *, mounted: Callable[[], None]) -> None:
        options = self._options
        identity = await self._identity(store)
        reader = await LogReader.open(store, identity, reads_only=True)
        check_steps(options.steps, reader.state)
        here = self._directory if self._descriptor is None else None
        with cache_directory.claimed(options.cache_dir, identity.lake_id, here) as cache:
            machine = Machine(cache, *budgets(options))
            disk = None
            if machine.disk_bytes:
                disk = await trio.to_thread.run_sync(
                    lambda: DiskCache(cache, identity.lake_id, limit=machine.disk_bytes)
                )
            mount = MountParts(options, store, reader, machine, disk)
            if (line := await mount.register()) is not None:
                _log.info("%s", line)
                self._tell(line)
            for line in await mount.origins.problems(reader.state, reader.first_live_step):
                _log.warning("%s", line)
                self._tell(line)
            self._silence.end()  # a serving daemon survives an outage
            flags = kernel.fuse_options(options.lake, allow_other=options.allow_other)
            try:
                with ExitStack() as scraped:
                    await self._serve_metrics(mount, scraped)
                    with (
                        interrupted_reads(),
                        self._guardian,
                        kernel.mounted(mount.operations, self._directory, flags) as device,
                        abort_handle(device) as self._abort_handle,
                    ):
                        mounted()
                        machine.device = device
                        await self._answer(mount, device)
            finally:
                with trio.CancelScope(shield=True):
                    await mount.aclose()
                    if disk is not None:
                        disk.close()
        _log.info("%s: %s", self._directory, self._why)

    async def _serve_metrics(self, mount: MountParts, held: ExitStack) -> None:
        """Serve until `held` closes. Retry: the previous mount releases its port slightly after its directory."""
        port, until = self._options.metrics_port, trio.current_time() + _PORT_S
        if port is None:
            return
        from stepfs import scrape  # noqa: PLC0415 (most mounts need no HTTP server)

        address, healthy = self._options.metrics_address, scrape.loop_turns()
        while True:
            try:
                held.enter_context(scrape.served(port, mount.registry, address=address, healthy=healthy))
            except RefusedError as error:
                cause = error.__cause__
                taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                if not taken or trio.current_time() >= until:
                    raise
                await trio.sleep(_PORT_RETRY_S)
            else:
                return

    async def _answer(self, mount: MountParts, device: str) -> None:
        async with trio.open_nursery() as answering:
            try:
                async with trio.open_nursery() as background:
                    self._background = background.cancel_scope
                    await mount.start(background)  # before the first request: handlers need these tasks
                    answering.start_soon(_answer_until_unmounted, background.cancel_scope)
                    if self._descriptor is None:
                        background.start_soon(_until_detached, background.cancel_scope, device)
                    await self._start(mount, background, device)
            finally:
                self._notifier.notify("STOPPING=1")
                kernel.stop()
                answering.cancel_scope.cancel()

    async def _start(self, mount: MountParts, background: trio.Nursery, device: str) -> None:
        if self._descriptor is None:
            await self._guard(mount, background)
        if mount.primer is not None:  # it calls into this mount itself: requests are answered, and a guardian watches
            await background.start(mount.primer.run)
        await mount.start_group(background)
        if self._descriptor is None:
            # Through the kernel, like a reader; not the root, which may hold 10⁶ steps.
            control = self._directory / ".stepfs"
            assert "status.json" in await trio.to_thread.run_sync(os.listdir, control, abandon_on_cancel=True)
            mount.machine.kernel = tune(device)
        await background.start(self._watchdog(mount, device).run)
        state = mount.log.state
        facts = {"lake_id": state.lake_id, "version": state.version, "group": self._options.group}
        _log.info("%s: serving %s, %d steps", self._directory, mount.store.url, state.next_step, extra=facts)
        self._notifier.notify("READY=1")
        self._ready()

    async def _guard(self, mount: MountParts, background: trio.Nursery) -> None:
        """Start a guardian; without one no thread of this process may call into its own mount."""
        at = mount_at(self._directory)
        if at is None or not await self._guardian.start(at.mount_id, self._abort_handle):
            if mount.primer is not None:
                _log.warning(
                    "priming is off: nobody could free the readers of %s if this process were killed while it primes;"
                    " mount fusectl on /sys/fs/fuse/connections, or mount as root",
                    self._directory,
                )
            mount.primer = None
            return
        background.start_soon(self._until_unguarded, mount)

    async def _until_unguarded(self, mount: MountParts) -> None:
        await self._guardian.ended()
        if mount.primer is not None:
            _log.warning("priming of %s is off: its guardian was killed; mount again", self._directory)
            mount.primer.stop()

    def _watchdog(self, mount: MountParts, device: str) -> watchdog.Watchdog:
        return watchdog.Watchdog(
            notify=self._notifier.notify,
            answered=mount.meter.requests.total,
            unanswered=lambda: watchdog.unanswered(device),
            held=lambda: mount.meter.held,
            status=mount.reports.line,
            on_stuck=lambda: watchdog.abort_and_exit(self._abort_handle),
            timing=watchdog.TIMING.under(os.environ, os.getpid()),
        )


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


async def _answer_until_unmounted(background: trio.CancelScope) -> None:
    try:
        await kernel.answer()
    finally:
        background.cancel()


async def _until_detached(background: trio.CancelScope, device: str) -> None:
    """Cancel once no path leads to the mount: `umount -l` with busy files only hides the kernel's end."""
    await trio.to_thread.run_sync(wait_until_detached, device, abandon_on_cancel=True)
    background.cancel()
