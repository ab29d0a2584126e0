"""Many mounts of one lake in virtual time: the real follower, group and node record of each, without kernel and data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from fakemount import facts_of

from stepfs.errors import StoreUnreachableError
from stepfs.follow.changes import Changes
from stepfs.follow.follower import Follower
from stepfs.follow.parts import GroupFollower
from stepfs.follow.polling import Spacing
from stepfs.format.identity import LakeIdentity
from stepfs.format.snapshot import LogState
from stepfs.lake.control import Control, Group
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.options import MountOptions
from stepfs.mount.status import Heartbeat
from stepfs.store.api import Buffer, Counts, Entry
from stepfs.view.tree import Tree, ViewOptions

Listing = list[Entry]  # inside the class `list` is the verb


class Server:
    """Objects, and what was asked of them: `FaultyStore` takes ten times as long for a hundred thousand requests."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self._listed: dict[str, Listing] = {}  # a thousand mounts list the same
        self.asked: Counter[tuple[str, str]] = Counter()  # (verb, kind of object)
        self.throttles = False

    def store(self, key: str, body: bytes) -> None:
        if key not in self.objects:
            self._listed.clear()
        self.objects[key] = body

    def remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._listed.clear()

    def listed(self, prefix: str) -> Listing:
        if prefix not in self._listed:
            self._listed[prefix] = [Entry(key, 1) for key in sorted(self.objects) if key.startswith(prefix)]
        return self._listed[prefix]

    async def ask(self, verb: str, key: str) -> bool:
        """Whether the server answers; it is busy otherwise."""
        lake, slash, rest = key.partition("/")
        self.asked[verb, rest.partition("/")[0] if slash else lake] += 1
        await trio.lowlevel.checkpoint()
        return not self.throttles


class LeanStore:
    """`stepfs.store.api.Store`: one mount's way to the server, without latency."""

    url = "memory://fleet"

    def __init__(self, server: Server) -> None:
        self.counts = Counts()
        self._server = server

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        del bytes_max
        await self._ask("get", key)
        return self._server.objects.get(key)

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
        del crc32c
        await self._ask("put", key)
        self._server.store(key, b"".join(parts))

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> Listing:
        del limit, ages
        await self._ask("list", prefix)
        found = self._server.listed(prefix)
        return [entry for entry in found if entry.key > after] if after else found

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            await self._ask("delete", key)
            self._server.remove(key)

    async def _ask(self, verb: str, key: str) -> None:
        if not await self._server.ask(verb, key):
            self.counts.throttled += 1
            raise StoreUnreachableError("503 SlowDown")


class OneOfMany:
    """One mount; `run` until cancelled."""

    def __init__(self, server: Server, identity: LakeIdentity, state: LogState, number: int, mounts: int) -> None:
        self.options = MountOptions(lake="memory://", directory=Path(f"/mnt/{number}"), group="run")
        self.store = LeanStore(server)
        self.meter = Meter()
        spacing = Spacing(mounts, lambda: self.store.counts.throttled)
        self.changes = Changes()
        self.identity = identity
        control = Control(self.store, identity, TrioClock())
        reader = LogReader(self.store, identity, control, state)
        self.follower = Follower(
            reader, self.changes, poll_s=0.1, find_lake_id=self._find_lake_id, on_change=lambda: None,
            spacing=spacing,
        )  # fmt: skip
        group = Group.on(control, "run")
        tree = Tree(reader, ViewOptions())
        self._need = GroupFollower(
            group, tree, lambda: None, checkpoints=None, spacing=spacing,
            poll_s=lambda: self.follower.pace.interval_s,
        )  # fmt: skip

    async def _find_lake_id(self) -> str:
        return (await open_lake(self.store)).lake_id

    async def run(self, *, waiting: bool) -> None:
        with ExitStack() as stack:
            if waiting:
                stack.enter_context(self.changes.listening())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.follower.run)
                nursery.start_soon(self._need.run)
                heartbeat = Heartbeat(
                    self.store, self.identity, "run", directory=self.options.directory,
                    facts=lambda: facts_of(self.follower, self.meter),
                )  # fmt: skip
                nursery.start_soon(heartbeat.run)


class Fleet:
    """Mounts that start together."""

    def __init__(self, server: Server, identity: LakeIdentity, state: LogState, number: int) -> None:
        self.server = server
        self.identity = identity
        self.mounts = [OneOfMany(server, identity, state, each, number) for each in range(number)]

    @classmethod
    async def of(cls, number: int) -> Fleet:
        store = FaultyStore()
        identity = await create_lake(store, slices=1, clock=TrioClock())
        await Group.of(store, identity, "run", TrioClock()).register()
        state = (await LogReader.open(store, identity)).state
        return cls(Server(store.shared.objects), identity, state, number)

    def start(self, nursery: trio.Nursery, *, waiting: bool = False) -> None:
        for mount in self.mounts:
            nursery.start_soon(partial(mount.run, waiting=waiting))

    async def requests(self, seconds: float) -> Counter[tuple[str, str]]:
        """What the server is asked in this time from now on."""
        before = self.server.asked.copy()
        await trio.sleep(seconds)
        return self.server.asked - before
