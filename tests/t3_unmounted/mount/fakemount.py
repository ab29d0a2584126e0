"""The handlers of one mount over a `FakeTable`, called as pyfuse3 would, without a kernel."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pyfuse3
import pytest
import trio
from faketable import CREATED_MS, FakeSlices, FakeTable

from stepfs.follow.changes import Changes
from stepfs.follow.follower import Follower
from stepfs.follow.waits import Waits
from stepfs.format.grid import Grid
from stepfs.format.ids import Step
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.guard import Meter
from stepfs.mount.fuse.kernel import LookupCounts
from stepfs.mount.fuse.operations import PendingSizes, StepOperations
from stepfs.view.inodes import Fixed
from stepfs.view.ranks import FileNames, rank_map
from stepfs.view.tree import Tree, ViewOptions

ROOT = pyfuse3.ROOT_INODE
FACTS = {  # of a mount, as `Reports.facts` gives them
    "frontier": 1, "next_step": 2, "first_step": 0, "sealed": True, "time": 1.0, "last_step": 1, "waited_s": 0.5,
    "waiting": 1, "open_files": 1, "known_directories": 1,
    "live_bytes": 1, "holder": "g", "held_steps": 1, "handovers": 0, "recoveries": 0,
    "store": {"trouble": None, "upgrade_needed": False, "poll_interval_s": 1.0, "connections": 4},
    "cache": dict.fromkeys(["memory_bytes", "memory_limit_bytes", "disk_bytes", "disk_limit_bytes"], 1),
}  # fmt: skip


def facts_of(follower: Follower, meter: Meter) -> dict[str, object]:
    """Those that a mount's record in the fleet view is made of."""
    waited_s = meter.waited.seconds()
    return {"next_step": follower.frontier + 1, "last_step": meter.last_step, "waited_s": waited_s}


@dataclass(frozen=True)
class Caller:
    """A RequestContext as handlers use it."""

    pid: int = 1234
    uid: int = 0
    gid: int = 0
    umask: int = 0


@dataclass
class Mounted:
    """One mount's parts, within reach of a test."""

    table: FakeTable
    tree: Tree
    slices: FakeSlices
    changes: Changes
    waits: Waits
    known: LookupCounts
    files: FileTable
    meter: Meter
    ops: StepOperations
    signalled: set[int]
    nursery: trio.Nursery = field(init=False)
    sizes_told: list[tuple[int, int, bytes]] = field(default_factory=list)
    listed: list[tuple[bytes, int, int]] = field(default_factory=list)
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    listing_room: int = 1_000_000

    def commit(self, count: int = 1) -> None:
        self.table.commit(count)
        self.changes.notify()

    def seal(self) -> None:
        self.table.seal()
        self.changes.notify()

    def later(self, seconds: float, act: Callable[..., object], *arguments: object) -> None:
        """Somebody else does it then."""

        async def wait() -> None:
            await trio.sleep(seconds)
            act(*arguments)

        self.nursery.start_soon(wait)

    async def lookup(self, *path: str, pid: int = 1234) -> pyfuse3.EntryAttributes:
        inode, found = ROOT, await self.ops.getattr(ROOT, Caller(pid))
        for name in path:
            found = await self.ops.lookup(inode, name.encode(), Caller(pid))
            inode = found.st_ino
        return found

    async def names(self, *path: str, pid: int = 1234) -> list[str]:
        handle = await self.ops.opendir((await self.lookup(*path, pid=pid)).st_ino, Caller(pid))
        names: list[str] = []
        last = 0
        while True:
            self.listed.clear()
            await self.ops.readdir(handle, last, None)
            if not self.listed:
                break
            names += [name.decode() for name, _, _ in self.listed]
            last = self.listed[-1][2]
        await self.ops.releasedir(handle)
        return names

    async def read(self, *path: str, pid: int = 1234) -> bytes:
        opened = await self.ops.open((await self.lookup(*path, pid=pid)).st_ino, 0, Caller(pid))
        data = bytes(await self.ops.read(opened.fh, 0, 1 << 20))
        await self.ops.release(opened.fh)
        return data

    def reply(self, token, name, entry, number) -> bool:
        if len(self.listed) == self.listing_room:
            return False
        self.listed.append((name, entry.st_ino, number))
        self.rows[name.decode()] = facts(entry)
        return True


@asynccontextmanager
async def mounted(
    *,
    steps=None,
    wait_s=None,
    world=None,
    mesh=None,
    slices=2,
    deadline_s=300.0,
    ext=".pt",
):
    """A mount with its waits running."""
    grid = slices if isinstance(slices, Grid) else Grid(slices)
    table = FakeTable(slices=grid.slices, ext=ext)
    tree = Tree(table, ViewOptions(steps, wait=wait_s is not None))
    changes, meter, known, files, fake = Changes(), Meter(), LookupCounts(), FileTable(), FakeSlices()
    signalled: set[int] = set()
    waits = Waits(tree, table, changes, deadline_s=deadline_s, wait_s=wait_s, has_signal=lambda pid: pid in signalled)

    async def describe(entry):
        return f"step {entry.step}\n"

    control = Control(
        table,
        tree,
        waits,
        files={
            Fixed.STATUS: lambda: f"next {table.state.next_step}\n",
            Fixed.METRICS: lambda: "metrics\n",
            Fixed.CONFIG: lambda: "config\n",
            Fixed.ACCESSLOG: meter.accesslog,
            Fixed.TRACE: lambda: "trace\n",
        },
        describe_step=describe,
        opened=files,
        now_ms=CREATED_MS,
    )
    made = Mounted(table, tree, fake, changes, waits, known, files, meter, None, signalled)  # type: ignore[arg-type]
    made.ops = StepOperations(
        reader=table, tree=tree, names=FileNames(rank_map(grid, world=world, mesh=mesh), ext), slices=fake,
        waits=waits, control=control, meter=meter, known=known, files=files,
        sizes=PendingSizes(lambda inode, size, data: made.sizes_told.append((inode, size, data))),
        readdir_reply=made.reply,
    )  # fmt: skip
    async with trio.open_nursery() as made.nursery:
        await made.nursery.start(waits.run)
        yield made
        made.nursery.cancel_scope.cancel()


def facts(entry: pyfuse3.EntryAttributes) -> tuple[int, ...]:
    """Everything the kernel is told of an inode."""
    times = entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns
    kept = entry.entry_timeout, entry.attr_timeout
    sizes = entry.st_size, entry.st_blocks, entry.st_blksize
    return (entry.st_ino, entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid, *sizes, *times, *kept)  # type: ignore[return-value]


@contextmanager
def fails(code: int):
    """The handler answers with this errno."""
    with pytest.raises(pyfuse3.FUSEError) as caught:
        yield
    assert caught.value.errno == code, f"{errno.errorcode[caught.value.errno]} for {errno.errorcode[code]}"


def step(number: int) -> Step:
    return Step(number)
