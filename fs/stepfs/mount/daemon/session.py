"""One mount from beginning to end, in this process: its parts, and their order of starting and ending.

prepare the directory → open the lake → claim a cache directory → mount → answer → … → detach → clean up

A daemon that takes the mount over, from one that serves or from a dead one, opens the lake, claims, says `ready`, and
answers once the keeper says `serve`; with `stop` it gives the mount to the next one.
"""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import trio

from stepfs._internal import interruption
from stepfs.data.disk_cache import DiskCache
from stepfs.data.waiting import Cause
from stepfs.errors import AbsentError, RefusedError, command
from stepfs.format.identity import LakeIdentity
from stepfs.lake.identity import open_lake
from stepfs.mount.daemon import watchdog
from stepfs.mount.daemon.ending import die, ends_the_mount
from stepfs.mount.daemon.keeper_socket import Tie
from stepfs.mount.daemon.parts import SEEN_S, Former, MountParts, OpenState, budgets, log_of, store_of
from stepfs.mount.daemon.replacement import Succession
from stepfs.mount.daemon.watchdog import RunningTime
from stepfs.mount.fuse import kernel
from stepfs.mount.fuse.kernel import interrupted_reads
from stepfs.mount.fuse.link import Link
from stepfs.mount.host import cache_directory, mount_points
from stepfs.mount.host.abort import abort_handle, places_of
from stepfs.mount.host.cache_directory import CachePlace
from stepfs.mount.host.kernel import tune
from stepfs.mount.host.mount_table import descriptor_of, mount_at, real_directory, wait_until_detached
from stepfs.mount.options import MountOptions
from stepfs.mount.state import State
from stepfs.mount.status import Machine
from stepfs.store.api import Store
from stepfs.store.silence import Say, Silence
from stepfs.view.ranks import check_steps

_log = logging.getLogger("stepfs.mount")

_PORT_S: Final = 2.0
_PORT_RETRY_S: Final = 0.1
_LAKE_POLL_S: Final = 1.0
_STATE_S: Final = 1.0
_STATE_SHARE: Final = 0.01  # of the time goes at most into writing it
_LOOK_S: Final = 5.0
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Ready = Callable[[], None]


def run(
    options: MountOptions,
    ready: Ready = lambda: None,
    say: Say = _log.warning,
    tell: Say = lambda _: None,
    tie: Tie | None = None,
) -> str:
    """`serve` in a fresh event loop. Call in the main thread: signals are handled there."""
    faulthandler.enable()  # a supervisor ends a stuck process with SIGABRT: show its stack
    return interruption.run(serve, options, ready, say, tell, tie, clock=RunningTime())


async def serve(
    options: MountOptions,
    ready: Ready,
    say: Say = _log.warning,
    tell: Say = lambda _: None,
    tie: Tie | None = None,
) -> str:
    """Mount, or take over a mount, as the keeper at the other end of `tie` says, and serve until unmounted, replaced or
    signalled; returns which of them ended it.

    `ready` is called once the mount answers a listing; until then, `say` is called with a line when the store is
    silent, and `tell` with one that is no warning. Raises `AbsentError`, `RefusedError`, `UsageError`,
    `StoreUnreachableError` before anything is mounted; afterwards only `ReplacedError`, when another lake takes this
    one's URL. Without a keeper it mounts, and nobody follows it.
    """
    with trio.open_signal_receiver(*_ENDING) as signals:
        async with trio.open_nursery() as nursery:
            session = _Session(options, ready, Silence(say), tell, tie)
            nursery.start_soon(session.end_on, signals)
            with watchdog.shown_on_signal(nursery):
                await session.serve()
            nursery.cancel_scope.cancel()
    return session.how


class _Session:
    """Two stages: before the mount stands a signal undoes everything at once; afterwards it starts to detach.

    Two nurseries: handlers answer the kernel in the outer one until the very end, because the tasks in the inner one
    (fetching, following, withdrawing names) may hold a worker thread that waits for an answer.
    """

    def __init__(self, options: MountOptions, ready: Ready, silence: Silence, tell: Say, tie: Tie | None) -> None:
        self._directory = real_directory(options.directory)
        self._descriptor = descriptor_of(self._directory)
        prime = options.prime and self._descriptor is None  # its paths are invisible from here
        self._options = dataclasses.replace(options, directory=self._directory, prime=prime)
        self._ready = ready
        self._silence, self._tell = silence, tell
        self._tie = tie
        start = {} if tie is None else tie.start
        self._before: dict[str, Any] | None = start.get("mount")  # None for the daemon that mounts
        self._counts: dict[str, int] = start.get("counts", dict.fromkeys(("generation", "handovers", "recoveries"), 0))
        self._opening = trio.CancelScope()
        self._background: trio.CancelScope | None = None
        self.how = (
            "unmounted"  # or signalled; given: to another daemon, and all that was read is answered; left: not all
        )
        self.ended_by: int | None = None
        self._why = "unmounted"
        self._abort_handle: int | None = None
        self._scraped = ExitStack()
        self._place: CachePlace | None = None
        self._has_cache = True  # it is this daemon that removes it
        self._crashed: bool = start.get("how") == "follow"  # the daemon before has
        self._guarded = self._ran = False
        self._old = -1  # of the daemon before: readable when that is dead
        self._died_s: float | None = None  # when it did, by the machine's monotonic clock
        self._writing = trio.Lock()
        self._state = State.fresh() if tie is None or self._before is None else State(tie.state)

    @property
    def _recovers(self) -> bool:
        """Whether another daemon follows this one."""
        return self._tie is not None and self._tie.mount is not None and self._options.recover

    def _notify(self, text: str) -> None:
        if self._tie is not None:
            self._tie.notify(text)

    async def end_on(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self.ended_by, self.how = number, "signalled"
            self._why = f"detached on {signal.Signals(number).name}"
            (self._background or self._opening).cancel()

    async def serve(self) -> None:
        with self._opening, ExitStack() as claimed:
            if self._descriptor is not None:
                mount_points.check_passed(self._descriptor)
            elif self._before is None:
                claimed.callback(os.close, await trio.to_thread.run_sync(mount_points.claim, self._directory))
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
                self._notify(f"EXTEND_TIMEOUT_USEC={int(left_s + _LAKE_POLL_S) * 1_000_000 + 30_000_000}")
                await trio.sleep(min(_LAKE_POLL_S, left_s))

    def _inherited(self) -> CachePlace | None:
        """The cache of the daemon before, if this one's is to be there, too."""
        before, cache_dir = self._before, self._options.cache_dir
        if before is None or self._tie is None or not before.get("cache") or self._tie.lock < 0 or cache_dir is None:
            return None
        path, keep_base = Path(before["cache"][0]), before["cache"][1]
        if not path.is_relative_to(cache_dir) or not cache_directory.answers(cache_dir):
            return None
        return CachePlace.inherited(path, self._tie.lock, keep_base=keep_base)

    def _cache_dir(self) -> Path | None:
        """None for a daemon that follows another one, where the disk does not answer: readers wait for what it serves."""
        found = self._options.cache_dir
        if self._before is None or found is None or cache_directory.answers(found):
            return found
        _log.warning("%s does not answer: this daemon serves without a disk cache", found)
        return None

    def _check_lake(self, lake_id: str) -> None:
        """`RefusedError` for another lake."""
        if self._before is not None and self._before["lake_id"] != lake_id:
            raise RefusedError(
                f"{self._directory}: lake {self._before['lake_id']} is mounted here, not {lake_id};"
                f" `{command('stepfs', 'unmount', self._directory)}` first"
            )

    async def _open(self, store: Store, *, mounted: Callable[[], None]) -> None:
        options, before = self._options, self._before
        former = None if before is None else Former(self._state.read(), crashed=self._crashed)
        identity = await self._identity(store)
        self._check_lake(identity.lake_id)
        reader = await log_of(options, store, identity, former)
        if before is None:  # a person's wish was checked when it was made
            check_steps(options.steps, reader.state)
        here = self._directory if self._descriptor is None else None
        cache_dir = self._cache_dir()
        inherited = None if cache_dir is None else self._inherited()
        self._has_cache = inherited is None
        with cache_directory.claimed(
            cache_dir, identity.lake_id, here, inherited=inherited, is_ours=lambda: self._has_cache
        ) as self._place:
            cache = None if self._place is None else self._place.path
            machine = Machine(
                cache, *budgets(options), handovers=self._counts["handovers"], recoveries=self._counts["recoveries"],
                follows=None if self._tie is None else self._tie.follows,
                keeper=None if self._tie is None else self._tie.keeper,
            )  # fmt: skip
            disk = None
            if machine.disk_bytes and cache is not None:
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
                        served = kernel.taken(mount.operations, flags, _link_of(before))
                    with (
                        interrupted_reads(),
                        served as link,
                        abort_handle(link.mount) as self._abort_handle,
                    ):
                        mounted()
                        machine.device = link.mount
                        link.shelter = mount.slices.shelter
                        await self._answer(mount, link)
            finally:
                left = machine.device and self.how == "signalled" and mount_at(self._directory) is None
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
        from stepfs._internal import scrape  # noqa: PLC0415 (most mounts need no HTTP server)

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
                    self._background = scope = background.cancel_scope
                    mount.meter.is_ending = lambda: self._recovers and scope.cancel_called
                    if self._descriptor is None:
                        await link.introduce()
                        await self._take(mount, background, link)
                        background.start_soon(_until_detached, background.cancel_scope, link.mount)
                    else:
                        await mount.start(background)  # before the first request: handlers need these tasks
                    answering.start_soon(self._answer_until_unmounted, link, background.cancel_scope)
                    await self._start(mount, background, link)
                if self.how in {"unmounted", "signalled"}:
                    self._notify("STOPPING=1")
            except BaseException as error:
                if self._tie is not None and not isinstance(error, trio.Cancelled):
                    link.owner = False  # no wish that the mount should end: the keeper decides
                    if self._recovers and not ends_the_mount(error):
                        die(self._tie, error)
                raise
            finally:
                link.shelter.close(False)
                answering.cancel_scope.cancel()

    async def _answer_until_unmounted(self, link: Link, background: trio.CancelScope) -> None:
        try:
            await link.answer()
            if self.how == "left":
                self.how = "given"
        finally:
            background.cancel()

    async def _take(self, mount: MountParts, background: trio.Nursery, link: Link) -> None:
        """Attach libfuse to the kernel, once no other daemon reads."""
        before, left, tie = self._before, OpenState(), self._tie
        if tie is not None and before is not None:
            await mount.follow(background)
            tie.say("ready")
            await self._await_turn(tie, mount, link)
            left = mount.inherit(crashed=self._crashed)
        elif tie is not None:
            facts = {
                "device": link.mount, "init": link.init.hex(), "reply": link.reply.hex(), "resends": link.has_resend,
                "lake_id": mount.log.identity.lake_id, "cache": self._cache_facts(), "needs": [],
            }  # fmt: skip
            tie.lock, tie.state = -1 if self._place is None else self._place.lock, self._state.descriptor
            tie.made(facts, link.device)
            said, _ = await tie.hear()
            self._know(mount, said)
        await mount.start(background)  # before the first request: handlers need these tasks
        if before is not None:
            await mount.see_all(SEEN_S / 2)  # before the keeper loses patience
        mount.begin()
        held = before is not None and watchdog.unanswered(link.mount) != 0
        link.attach()
        if self._crashed:
            link.resend()
        stopped_s = self._died_s if self._crashed else left.stopped_s
        if before is not None and stopped_s is not None:
            gap_s = time.monotonic() - stopped_s
            _log.info("nobody read the requests of %s for %.1f ms", self._directory, 1e3 * gap_s)
            if held:
                mount.slices.ledger.note(Cause.TAKEOVER, gap_s)

    async def _await_turn(self, tie: Tie, mount: MountParts, link: Link) -> None:
        """Until the keeper says that this daemon serves. The errors of `see`."""
        while True:
            said, given = await tie.hear()
            match said.get("do"):
                case "see":
                    tie.say("seen", version=await mount.see(said["version"]))
                case "serve":
                    link.device = tie.device = given[0]
                    self._old = given[1] if len(given) > 1 else -1
                    link.owner = True
                    self._crashed, self._died_s = said["crashed"], said.get("died_s")
                    self._know(mount, said)
                    return
                case None:
                    raise RefusedError(f"{self._directory}: the keeper has ended before this daemon served")

    def _know(self, mount: MountParts, said: dict[str, Any]) -> None:
        """Of the keeper: its number, where it listens, and whether it can cut the connection."""
        self._guarded = said.get("guarded", False)
        mount.machine.keeper, mount.machine.place = said.get("keeper"), said.get("place")
        if self._ran:
            self._check_guarded(mount)

    def _cache_facts(self) -> list[Any] | None:
        return None if self._place is None else [str(self._place.path), self._place.keep_base]

    async def _start(self, mount: MountParts, background: trio.Nursery, link: Link) -> None:
        tie, before = self._tie, self._before
        if before is not None:
            await self._look(link)
            await self._say_that_it_serves(mount)
        if self._descriptor is None:
            self._check_guarded(mount)
            self._ran = True
        if mount.primer is not None:  # it calls into this mount itself: requests are answered, and the keeper can cut
            await background.start(mount.primer.run)
        await mount.start_group(background)
        if self._descriptor is None:
            if before is None:
                await self._look(link)
            mount.machine.kernel = tune(link.mount)
            background.start_soon(self._keep_state, mount)
        await background.start(self._watchdog(mount, link).run)
        now = mount.log.state
        facts = {"lake_id": now.lake_id, "version": now.version, "group": self._options.group}
        after = ""
        if before is not None and tie is not None:
            after = f", after pid {tie.follows} that {'died' if self._crashed else 'gave it away'}"
        if before is None and tie is not None:
            tie.say("serving")
        if tie is not None:
            background.start_soon(self._serve_on, tie, mount, link, background)
        self._ready()  # before the line: whoever reads it may kill this daemon, which then has served
        _log.info("%s: serving %s, %d steps%s", self._directory, mount.store.url, now.next_step, after, extra=facts)

    async def _look(self, link: Link) -> None:
        """Through the kernel, like a reader, wherever the mount can be seen; not at the root, which may hold 10⁶ steps."""
        try:
            with trio.move_on_after(_LOOK_S):
                await trio.to_thread.run_sync(_list_control, link.mount, abandon_on_cancel=True)
        except FileNotFoundError:
            if places_of(link.mount):
                raise
            assert self._background is not None
            self._background.cancel()  # unmounted meanwhile
            await trio.sleep_forever()

    async def _say_that_it_serves(self, mount: MountParts) -> None:
        """The mount is this daemon's for good once it answers."""
        assert self._tie is not None
        inherits = self._place is not None and not self._has_cache
        self._has_cache = True
        given = [] if inherits or self._place is None else [self._place.lock]
        self._tie.lock = -1 if self._place is None else self._place.lock
        self._tie.mount = {**self._tie.start["mount"], "cache": self._cache_facts()}
        self._tie.say("serving", given, inherits=inherits, cache=self._cache_facts())
        try:
            await self._serve_metrics(mount)
        except RefusedError as error:
            _log.warning("no metrics: %s", error)

    async def _keep_state(self, mount: MountParts) -> None:
        """What the next daemon gets if this one is killed. Not while another one takes over."""
        while True:
            began = time.perf_counter()
            async with self._writing:
                await trio.to_thread.run_sync(mount.state.note, mount.readers())
            await trio.sleep(max(_STATE_S, (time.perf_counter() - began) / _STATE_SHARE))

    def _check_guarded(self, mount: MountParts) -> None:
        """Without another process that can cut the connection no thread of this one may call into its own mount."""
        if self._guarded or mount.primer is None:
            return
        _log.warning(
            "priming is off: nobody could free the readers of %s if this process were killed while it primes;"
            " mount fusectl on /sys/fs/fuse/connections, or mount as root",
            self._directory,
        )
        mount.primer.stop()
        mount.primer = None

    async def _serve_on(self, tie: Tie, mount: MountParts, link: Link, background: trio.Nursery) -> None:
        """Until the mount is another daemon's, which answers from now on."""
        succession = Succession(tie, mount, link, self._writing, lambda said: self._know(mount, said), self._old)
        said = await succession.run(background)
        self.how, self._why = "left", f"handed over to pid {said['pid']}"
        self._has_cache = not said["keeps_cache"]
        self._scraped.close()
        if mount.heartbeat is not None:
            mount.heartbeat.stays = True
        link.leave()
        mount.slices.set_memory(0)
        await succession.drain()
        background.cancel_scope.cancel()

    def _end_stuck(self) -> None:
        """Let another daemon try: the keeper decides."""
        if self._tie is not None and self._recovers:
            self._tie.say("ended", how="stuck")
            watchdog.exit_stuck(b"the next one serves")
        watchdog.abort_and_exit(self._abort_handle)

    def _watchdog(self, mount: MountParts, link: Link) -> watchdog.Watchdog:
        return watchdog.Watchdog(
            notify=self._notify,
            answered=mount.meter.requests.total,
            unanswered=lambda: watchdog.unanswered(link.mount),
            held=lambda: mount.meter.held,
            status=mount.reports.line,
            on_stuck=self._end_stuck,
            timing=watchdog.TIMING.under(os.environ, os.getpid()),
        )


def _link_of(before: dict[str, Any]) -> Link:
    """To a mount that another daemon made. The device comes when this one serves; until then, libfuse has a number for it."""
    number = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    init, reply = bytes.fromhex(before["init"]), bytes.fromhex(before["reply"])
    return Link(number, -1, init, reply, mount=before["device"], owner=False)


def _list_control(device: str) -> None:
    """`FileNotFoundError` if the mount does not answer as one, or is gone."""
    major, minor = map(int, device.split(":"))
    places = [Path(place) for place, _ in places_of(device)]
    if not places:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), device)
    for place in places:
        if place.stat().st_dev == os.makedev(major, minor):  # else something is mounted over it
            assert any(path.name == "status.json" for path in (place / ".stepfs").iterdir())
            return


async def _until_detached(background: trio.CancelScope, device: str) -> None:
    """Cancel once no path leads to the mount: `umount -l` with busy files only hides the kernel's end."""
    await trio.to_thread.run_sync(wait_until_detached, device, abandon_on_cancel=True)
    background.cancel()
