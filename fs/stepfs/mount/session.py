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
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import sdnotify
import trio

from stepfs import interruption
from stepfs.data.disk import DiskCache
from stepfs.errors import AbsentError, RefusedError
from stepfs.format.records import LakeIdentity
from stepfs.lake.identity import open_lake
from stepfs.mount import handover
from stepfs.mount.fuse import kernel
from stepfs.mount.fuse.kernel import interrupted_reads
from stepfs.mount.fuse.link import Link
from stepfs.mount.handover import ANSWER_S, COUNTS, DRAIN_S, Predecessor, credentials, heard, is_friend, listening
from stepfs.mount.health import watchdog
from stepfs.mount.health.guardian import Guardian, idle_thread, may_cut, order
from stepfs.mount.health.watchdog import RunningTime
from stepfs.mount.host import cache_directory, mount_points
from stepfs.mount.host.abort import abort_handle
from stepfs.mount.host.cache_directory import CachePlace
from stepfs.mount.host.kernel import tune
from stepfs.mount.host.messages import pair, send
from stepfs.mount.host.mount_points import mount_at, real_directory, wait_until_detached
from stepfs.mount.options import MountOptions
from stepfs.mount.parts import Former, MountParts, OpenState, budgets, log_of, store_of
from stepfs.mount.state import State
from stepfs.mount.status import Machine
from stepfs.store.api import Store
from stepfs.store.silence import Say, Silence
from stepfs.view.ranks import check_steps

_log = logging.getLogger("stepfs.mount")

_PORT_S: Final = 2.0
_PORT_RETRY_S: Final = 0.1
_LAKE_POLL_S: Final = 1.0
_WITHOUT_CACHE: Final = (
    4  # descriptors that a daemon which takes over sends: its socket, its order, the device, the papers
)
_PAPERS_S: Final = 1.0
_DRAINED_POLL_S: Final = 0.01
_PAPERS_SHARE: Final = 0.01  # of the time goes at most into writing them
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Ready = Callable[[], None]


def run(
    options: MountOptions,
    ready: Ready = lambda: None,
    say: Say = _log.warning,
    tell: Say = lambda _: None,
    predecessor: Predecessor | None = None,
) -> int | None:
    """`serve` in a fresh event loop. Call in the main thread: signals are handled there."""
    faulthandler.enable()  # a supervisor ends a stuck process with SIGABRT: show its stack
    return interruption.run(serve, options, ready, say, tell, predecessor, clock=RunningTime())


async def serve(
    options: MountOptions,
    ready: Ready,
    say: Say = _log.warning,
    tell: Say = lambda _: None,
    predecessor: Predecessor | None = None,
) -> int | None:
    """Mount, or take over from `predecessor`, and serve until unmounted, replaced or signalled; returns the signal that
    ended it, if one did.

    `ready` is called once the mount answers a listing; until then, `say` is called with a line when the store is
    silent, and `tell` with one that is no warning. Raises `AbsentError`, `RefusedError`, `UsageError`,
    `StoreUnreachableError` before anything is mounted; afterwards only `ReplacedError`, when another lake takes this
    one's URL.
    """
    with trio.open_signal_receiver(*_ENDING) as signals:
        async with trio.open_nursery() as nursery:
            session = _Session(options, ready, Silence(say), tell, predecessor)
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

    def __init__(
        self, options: MountOptions, ready: Ready, silence: Silence, tell: Say, predecessor: Predecessor | None
    ) -> None:
        self._directory = real_directory(options.directory)
        self._descriptor = mount_points.descriptor_of(self._directory)
        prime = options.prime and self._descriptor is None  # its paths are invisible from here
        self._options = dataclasses.replace(options, directory=self._directory, prime=prime)
        self._ready = ready
        self._silence, self._tell = silence, tell
        self._predecessor = predecessor
        self._opening = trio.CancelScope()
        self._background: trio.CancelScope | None = None
        self.ended_by: int | None = None
        self._why = "unmounted"
        self._abort_handle: int | None = None
        self._guardian = Guardian(self._directory)
        self._notifier = sdnotify.SystemdNotifier()
        self._scraped = ExitStack()
        self._place: CachePlace | None = None
        self._has_cache = True  # it is this daemon that removes it
        self._giving = False
        self._heir: socket.socket | None = None
        self._draining: socket.socket | None = None  # to the daemon before, as long as it answers what it had read
        self._drained = trio.Event()
        if predecessor is None:
            self._state = State.fresh()
            self._counts = dict.fromkeys(COUNTS, 0)
        else:
            self._state = State(predecessor.papers)
            self._counts = predecessor.succeeded()
        self._papers = self._state.descriptor
        self._writing = trio.Lock()
        self._facts: dict[str, Any] = {}

    async def end_on(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self.ended_by = number
            self._why = f"detached on {signal.Signals(number).name}"
            (self._background or self._opening).cancel()

    async def serve(self) -> None:
        with self._opening, ExitStack() as claimed:
            if self._descriptor is not None:
                mount_points.check_passed(self._descriptor)
            elif self._predecessor is None:
                claimed.callback(os.close, await trio.to_thread.run_sync(mount_points.claim, self._directory))
            store = store_of(self._options, self._options.lake, self._silence)
            try:
                await self._open(store, mounted=claimed.close)
            finally:
                with trio.CancelScope(shield=True):
                    await store.aclose()
                os.close(self._papers)

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

    def _cache_dir(self) -> Path | None:
        """None for a daemon that follows another one, where the disk does not answer: readers wait for what it serves."""
        found = self._options.cache_dir
        if self._predecessor is None or found is None or cache_directory.answers(found):
            return found
        _log.warning("%s does not answer: this daemon serves without a disk cache", found)
        return None

    async def _open(self, store: Store, *, mounted: Callable[[], None]) -> None:
        options, before = self._options, self._predecessor
        former = None if before is None else Former(self._state.read(), before.crashed)
        identity = await self._identity(store)
        if before is not None:
            before.check_lake(self._directory, identity.lake_id)
        reader = await log_of(options, store, identity, former)
        if before is None:  # else it was checked when a person wished it; meanwhile the lake may have been sealed
            check_steps(options.steps, reader.state)
        here = self._directory if self._descriptor is None else None
        cache_dir = self._cache_dir()
        inherited = None if before is None else before.cache(cache_dir)
        self._has_cache = inherited is None
        with cache_directory.claimed(
            cache_dir, identity.lake_id, here, inherited=inherited, is_ours=lambda: self._has_cache
        ) as self._place:
            cache = cache_directory.NOWHERE if self._place is None else self._place.path
            machine = Machine(
                cache, *budgets(options), handovers=self._counts["handovers"], recoveries=self._counts["recoveries"],
                follows=None if before is None else before.facts["pid"],
            )  # fmt: skip
            disk = None
            if machine.disk_bytes and self._place is not None:
                shared = inherited is not None
                disk = await trio.to_thread.run_sync(
                    lambda: DiskCache(cache, identity.lake_id, limit=machine.disk_bytes, shared=shared)
                )
            mount = MountParts(options, store, reader, machine, disk, state=self._state, former=former)
            mount.files.follow(self._counts["generation"])
            if (line := await mount.register()) is not None:
                _log.info("%s", line)
                self._tell(line)
            for line in await mount.origins.problems(reader.state, reader.first_live_step):
                _log.warning("%s", line)
                self._tell(line)
            self._silence.end()  # a serving daemon survives an outage
            flags = kernel.fuse_options(options.lake, allow_other=options.allow_other)
            try:
                with self._scraped:
                    if before is None:
                        await self._serve_metrics(mount)
                        served = kernel.mounted(mount.operations, self._directory, flags)
                    else:
                        served = kernel.taken(mount.operations, self._directory, flags, before.link())
                    with (
                        interrupted_reads(),
                        self._guardian,
                        served as link,
                        abort_handle(link.mount) as self._abort_handle,
                    ):
                        mounted()
                        machine.device = link.mount
                        link.shelter = mount.slices.shelter
                        await self._answer(mount, link)
            finally:
                left = machine.device and self._heir is None and mount_at(self._directory) is None
                if left and self.ended_by == signal.SIGTERM:
                    mount_points.close_behind(self._directory)
                with trio.CancelScope(shield=True):
                    await mount.aclose()
                    if disk is not None:
                        disk.close()
        _log.info("%s: %s", self._directory, self._why)

    async def _serve_metrics(self, mount: MountParts) -> None:
        """Serve while the mount stands. Retry: the previous mount releases its port slightly after its directory."""
        port, until = self._options.metrics_port, trio.current_time() + _PORT_S
        if port is None:
            return
        from stepfs import scrape  # noqa: PLC0415 (most mounts need no HTTP server)

        address, healthy = self._options.metrics_address, scrape.loop_turns()
        while True:
            try:
                self._scraped.enter_context(scrape.served(port, mount.registry, address=address, healthy=healthy))
            except RefusedError as error:
                cause = error.__cause__
                taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                if not taken or trio.current_time() >= until:
                    raise
                await trio.sleep(_PORT_RETRY_S)
            else:
                return

    async def _answer(self, mount: MountParts, link: Link) -> None:
        async with trio.open_nursery() as answering:
            try:
                async with trio.open_nursery() as background:
                    self._background = background.cancel_scope
                    if self._descriptor is None:
                        await link.introduce()
                        await self._take(mount, background, link)
                        background.start_soon(_until_detached, background.cancel_scope, link.mount)
                    else:
                        await mount.start(background)  # before the first request: handlers need these tasks
                    answering.start_soon(self._answer_until_unmounted, link, background.cancel_scope)
                    await self._start(mount, background, link)
            finally:
                self._notifier.notify("STOPPING=1" if self._heir is None else "STATUS=handed over")
                if not link.owner:  # another daemon serves, or may
                    self._guardian.give_up()
                link.shelter.close(False)
                answering.cancel_scope.cancel()

    async def _answer_until_unmounted(self, link: Link, background: trio.CancelScope) -> None:
        try:
            await link.answer()
            if self._heir is not None:
                send(self._heir, {"done": True})
        finally:
            background.cancel()

    async def _take(self, mount: MountParts, background: trio.Nursery, link: Link) -> None:
        """Attach libfuse to the kernel, once no other daemon reads."""
        before, left = self._predecessor, OpenState()
        self._facts = self._own_facts(mount, link)
        if before is not None:
            await mount.follow(background)
            ours, theirs = pair()
            with theirs, self._order() as order:
                held = [theirs.fileno(), order, *self._held(link)]
                guarded = await before.give(idle_thread(), held, mount.see)
            if guarded:
                self._guardian.adopt(ours)
            else:
                ours.close()
            left = mount.inherit()
        await mount.start(background)  # before the first request: handlers need these tasks
        if before is not None:
            await mount.see_all(ANSWER_S / 2)  # before the other one loses patience
        mount.begin()
        link.attach()
        if before is None:
            if self._options.recover and link.has_resend:
                handover.keep(link, self._papers)
        elif before.crashed:
            link.resend()
        else:
            gap_ms = 1e3 * (time.monotonic() - left.stopped_s)
            _log.info("nobody read the requests of %s for %.1f ms", self._directory, gap_ms)
        handover.write_facts(self._papers, self._facts)

    async def _start(self, mount: MountParts, background: trio.Nursery, link: Link) -> None:
        before = self._predecessor
        if before is not None:
            await self._settle(before, mount, background, link)
        if self._descriptor is None:
            await self._guard(mount, background, link)
        if mount.primer is not None:  # it calls into this mount itself: requests are answered, and a guardian watches
            await background.start(mount.primer.run)
        await mount.start_group(background)
        if self._descriptor is None:
            await self._look()
            mount.machine.kernel = tune(link.mount)
            background.start_soon(self._await_heirs, mount, link)
            background.start_soon(self._keep_papers, mount)
        await background.start(self._watchdog(mount, link).run)
        state = mount.log.state
        facts = {"lake_id": state.lake_id, "version": state.version, "group": self._options.group}
        after = (
            ""
            if before is None
            else f", after pid {before.facts['pid']} that {'died' if before.crashed else 'gave it away'}"
        )
        self._notifier.notify("READY=1")
        self._ready()  # before the line: whoever reads it may kill this daemon, which then has served
        _log.info("%s: serving %s, %d steps%s", self._directory, mount.store.url, state.next_step, after, extra=facts)

    async def _look(self) -> None:
        """Through the kernel, like a reader; not at the root, which may hold 10⁶ steps."""
        control = self._directory / ".stepfs"
        try:
            assert "status.json" in await trio.to_thread.run_sync(os.listdir, control, abandon_on_cancel=True)
        except FileNotFoundError:
            if mount_at(self._directory) is not None:
                raise
            assert self._background is not None
            self._background.cancel()  # unmounted meanwhile
            await trio.sleep_forever()

    async def _settle(self, before: Predecessor, mount: MountParts, background: trio.Nursery, link: Link) -> None:
        """The mount is this daemon's for good once it answers."""
        await self._look()
        link.owner = self._has_cache = True
        if before.sock is not None and not before.crashed:
            send(before.sock, {"serving": True})
            await heard(before.sock)  # that it has given
            if link.has_resend:
                self._draining = before.sock
                background.start_soon(self._until_drained, before.sock, link)
        try:
            await self._serve_metrics(mount)
        except RefusedError as error:
            _log.warning("no metrics: %s", error)

    async def _until_drained(self, sock: socket.socket, link: Link) -> None:
        """If the daemon before ends with requests unanswered, they are sent again."""
        said, _ = await heard(sock, float("inf"))
        if "done" not in said:
            await link.read_on()
        self._draining = None
        self._drained.set()

    def _held(self, link: Link) -> list[int]:
        return [link.device, self._papers, *([] if self._place is None else [self._place.lock])]

    def _own_facts(self, mount: MountParts, link: Link) -> dict[str, Any]:
        cache = None if self._place is None else [str(self._place.path), self._place.keep_base]
        lake_id = mount.log.identity.lake_id
        return handover.facts_of(link, self._options, lake_id, cache=cache, **self._counts)

    async def _keep_papers(self, mount: MountParts) -> None:
        """What the next daemon gets if this one is killed. Not while another one takes over."""
        while True:
            began = time.perf_counter()
            async with self._writing:
                await trio.to_thread.run_sync(mount.state.note, mount.readers())
            await trio.sleep(max(_PAPERS_S, (time.perf_counter() - began) / _PAPERS_SHARE))

    @contextmanager
    def _order(self) -> Iterator[int]:
        number = order(self._directory, self._options.to_json(), recover=self._options.recover)
        try:
            yield number
        finally:
            os.close(number)

    async def _guard(self, mount: MountParts, background: trio.Nursery, link: Link) -> None:
        """Start a guardian; without one no thread of this process may call into its own mount."""
        at = mount_at(self._directory)
        if self._guardian.holds:
            guarded = may_cut(self._abort_handle)
        elif at is None:
            guarded = False
        elif link.has_resend:
            with self._order() as order:
                guarded = await self._guardian.start(at.mount_id, self._abort_handle, [order, *self._held(link)])
        else:
            guarded = await self._guardian.start(at.mount_id, self._abort_handle, [])
        if not guarded:
            if mount.primer is not None:
                _log.warning(
                    "priming is off: nobody could free the readers of %s if this process were killed while it primes;"
                    " mount fusectl on /sys/fs/fuse/connections, or mount as root",
                    self._directory,
                )
                mount.primer.stop()
            mount.primer = None
            return
        background.start_soon(self._until_unguarded, mount)

    async def _until_unguarded(self, mount: MountParts) -> None:
        await self._guardian.ended()
        if mount.primer is not None and self._heir is None:
            _log.warning("priming of %s is off: its guardian was killed; mount again", self._directory)
            mount.primer.stop()

    async def _await_heirs(self, mount: MountParts, link: Link) -> None:
        """Give the mount to the next daemon that asks for it."""
        with listening(link.mount) as sock:
            if sock is None:
                return
            async with trio.open_nursery() as nursery:
                while True:
                    await trio.lowlevel.wait_readable(sock)
                    nursery.start_soon(self._offer, mount, link, sock.accept()[0])

    async def _offer(self, mount: MountParts, link: Link, peer: socket.socket) -> None:
        with peer:
            if not is_friend(peer):
                return
            send(peer, {"protocol": handover.PROTOCOL}, self._held(link))
            said, descriptors = await heard(peer, float("inf"))
            try:
                if "go" not in said:
                    return
                if self._giving or mount.files.closing:
                    send(peer, {"refused": "another daemon takes it over, or it is about to be unmounted"})
                    return
                self._giving = True
                try:
                    await self._go(mount, link, peer, said["thread"], descriptors)
                finally:
                    self._giving = False
                    mount.slices.go_on()
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    async def _go(
        self, mount: MountParts, link: Link, peer: socket.socket, thread: int, descriptors: list[int]
    ) -> None:
        """Give the mount away, once nothing is lost by it."""
        if self._draining is not None:
            send(self._draining, {"hurry": True})
            await self._drained.wait()
        if not await self._has_seen_all(mount, peer):  # first of all: while it settles, nothing is fetched ahead
            return
        if mount.primer is not None:
            with trio.move_on_after(handover.SETTLE_S):
                await mount.slices.settle()
            if not await self._has_seen_all(mount, peer):
                return
        if mount.files.closing:
            send(peer, {"refused": "it is about to be unmounted"})
            return
        async with self._writing, AsyncExitStack() as quiet:
            if mount.primer is not None:
                await quiet.enter_async_context(mount.primer.turn)
            await self._give(mount, link, peer, thread, descriptors)

    async def _has_seen_all(self, mount: MountParts, peer: socket.socket) -> bool:
        """Return once the next daemon has seen the steps that are shown here: else readers wait for its look at the store.
        False if it has ended, or will.
        """
        seen = -1
        while seen < mount.log.state.version:
            send(peer, {"version": mount.log.state.version})
            said, _ = await heard(peer, 2 * ANSWER_S)
            if "seen" not in said:
                return False
            seen = said["seen"]
        return True

    async def _give(
        self, mount: MountParts, link: Link, peer: socket.socket, thread: int, descriptors: list[int]
    ) -> None:
        """The next daemon reads on, or this one does. Does not return as long as the other one serves."""
        pid, _ = credentials(peer)
        with handover.life_of(pid, thread) as life:
            guarded = self._guardian.join(thread, descriptors)
            mount.state.note(mount.readers())
            await link.stop()
            mount.waits.give(given=link.has_resend)
            self._facts["generation"] += 1  # of the one after that one, too, if that one fails
            handover.write_facts(self._papers, self._facts)
            mount.hand_over()
            send(peer, {"yours": True, "guarded": guarded})
            until = trio.current_time() + ANSWER_S
            if "serving" not in (await heard(peer, life=life))[0]:
                why = "ended before it served" if trio.current_time() < until else f"did not serve for {ANSWER_S:g} s"
                await trio.to_thread.run_sync(handover.end, pid, life)
                mount.take_back()
                handover.write_facts(self._papers, self._facts)
                mount.waits.give(given=False)
                await link.read_on()
                _log.warning("pid %d %s %s: it is served as before", pid, why, self._directory)
                return
        self._heir, self._why = peer, f"handed over to pid {pid}"
        self._has_cache = self._place is not None and len(descriptors) <= _WITHOUT_CACHE
        self._guardian.give_up()
        self._scraped.close()
        if mount.heartbeat is not None:
            mount.heartbeat.stays = True
        self._notifier.notify(f"MAINPID={pid}")
        send(peer, {"given": True})
        link.leave()
        mount.slices.set_memory(0)
        if not link.has_resend:
            await trio.sleep_forever()
        with trio.move_on_after(DRAIN_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_heard, peer, nursery.cancel_scope)
                # The next daemon has those sent again that wait for a commit, once nobody else is left.
                while not 0 < mount.meter.held <= mount.waits.waiting:  # noqa: ASYNC110 -- counts tell nobody
                    await trio.sleep(_DRAINED_POLL_S)
                nursery.cancel_scope.cancel()
        assert self._background is not None
        self._background.cancel()

    def _end_stuck(self) -> None:
        """Let another daemon try; but not after one that has died: it may be the requests that do it."""
        if self._guardian.holds and self._options.recover and not (self._predecessor and self._predecessor.crashed):
            watchdog.exit_stuck(b"the next one serves")
        watchdog.abort_and_exit(self._abort_handle)

    def _watchdog(self, mount: MountParts, link: Link) -> watchdog.Watchdog:
        return watchdog.Watchdog(
            notify=self._notifier.notify,
            answered=mount.meter.requests.total,
            unanswered=lambda: watchdog.unanswered(link.mount),
            held=lambda: mount.meter.held,
            status=mount.reports.line,
            on_stuck=self._end_stuck,
            timing=watchdog.TIMING.under(os.environ, os.getpid()),
        )


async def _until_heard(peer: socket.socket, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the next daemon hurries, or has ended."""
    await heard(peer, float("inf"))
    scope.cancel()


async def _until_detached(background: trio.CancelScope, device: str) -> None:
    """Cancel once no path leads to the mount: `umount -l` with busy files only hides the kernel's end."""
    await trio.to_thread.run_sync(wait_until_detached, device, abandon_on_cancel=True)
    background.cancel()
