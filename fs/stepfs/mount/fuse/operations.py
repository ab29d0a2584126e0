"""The kernel's requests, answered from memory wherever possible.

A handler for the *root* never awaits: the kernel lets one request at a time through a directory's lock. Handlers inside
a step directory may wait, with a deadline and no longer than the caller lives (`waits`). Awaits that may yield: `_entry`
(after it every fact is read again), `sizes.settle` and the reads of open files. Each in the shelter: what this daemon
has read it answers, also when the next one reads on.
"""

import base64
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pyfuse3
import trio

from stepfs.data.slices import Slices
from stepfs.errors import OtherHistoryError
from stepfs.follow.waits import WaitOutcome, Waits
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.log.reader import LogReader
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import (
    FileTable,
    OpenContent,
    OpenDirectory,
    OpenFile,
    OpenRoot,
    OpenSlice,
    OpenStep,
    OpenUnread,
    ReaddirReply,
    Replies,
    Rows,
    inode_of,
    length_of,
)
from stepfs.mount.fuse.guard import Meter, Shares, guarded, read_only, refusal
from stepfs.mount.fuse.kernel import LookupCounts
from stepfs.mount.fuse.link import TASKS_MAX
from stepfs.view import attributes
from stepfs.view.attributes import Attributes
from stepfs.view.inodes import Fixed, SliceFile, StepDirectory, StepFile, WaitFile, directory_inode, node_of
from stepfs.view.names import CONTROL_DIRECTORY, LATEST, parse_step, step_name
from stepfs.view.ranks import FileNames, RankMap
from stepfs.view.tree import Presence, Tree

_log = logging.getLogger("stepfs.mount")

StorePages = Callable[[int, int, bytes | memoryview], None]  # `pyfuse3.notify_store`
LastByte = Callable[[], Awaitable[bytes | memoryview]]

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT
_STATFS_BLOCK_BYTES: Final = 4096
_NAME_BYTES_MAX: Final = 255
_WAITING_MAX: Final = TASKS_MAX * 3 // 4  # of requests that wait for a step, its index or its facts


class PendingSizes:
    """Files that the kernel takes for empty: looked up before their step was committed. At most the inodes that it remembers."""

    def __init__(self, store: StorePages = pyfuse3.notify_store) -> None:  # type: ignore[assignment]
        self._store = store
        self._pending: set[int] = set()
        self._told: set[int] | None = None  # files whose size the kernel surely has; None: all that are not pending

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pending)

    def doubt(self) -> None:
        """Another daemon has died, and what it knew is lost: each file may be one of these."""
        self._told = set()

    def note(self, inode: int) -> None:
        """Note that the kernel gets size 0 for this file."""
        self._pending.add(inode)

    def forget(self, inode: int) -> None:
        self._pending.discard(inode)
        if self._told:
            self._told.discard(inode)

    def has(self, inode: int) -> bool:
        return inode in self._pending or (self._told is not None and inode not in self._told)

    async def settle(self, inode: int, size: int, last_byte: LastByte) -> None:
        """Give the kernel the true size of such a file before it is opened."""
        if size:
            try:
                byte = await last_byte()
                # All concurrent opens of the file do the same: one that returned at once might be faster than the
                # kernel. In a worker thread, like every notification: see `mount/fuse/kernel.py`.
                await trio.to_thread.run_sync(self._store, inode, size - 1, byte)
            except (OSError, pyfuse3.FUSEError) as error:
                _log.debug("inode %d keeps size 0 until somebody asks: %s", inode, error)
        self._pending.discard(inode)
        if self._told is not None:
            self._told.add(inode)


@dataclass(frozen=True, eq=False, slots=True)
class KnownAttributes:
    """The attributes of names and inodes that are known in memory: the answers that never wait."""

    reader: LogReader
    tree: Tree
    ranks: RankMap
    control: Control
    files: FileTable
    sizes: PendingSizes

    def in_root(self, name: bytes) -> Attributes | None:
        step = parse_step(name)
        if step is not None:
            if self.tree.presence(step) is Presence.ABSENT:
                return None
            return attributes.step_directory(self.reader, self.tree, step)
        if name == LATEST:
            newest = self.tree.latest()
            return None if newest is None else attributes.latest(self.reader, newest)
        return self.control.directory if name == CONTROL_DIRECTORY else None

    def unopenable(self, step: Step, index: SliceIndex) -> Attributes:
        """A file of a pending or released step, for a listing: size 0, unless the file is still open here. Another size
        than before would cut the pages that its readers have mapped.
        """
        entry = self.files.entry_of(step, index) if step < self.tree.next_step else None
        if entry is not None:
            return self.of_index(entry, index)
        return attributes.pending_file(self.reader, step, index, self.ranks.links)

    def looked_up_unopenable(self, step: Step, index: SliceIndex) -> Attributes:
        """The same for a lookup. A file of size 0 is one that the kernel takes for empty from now on."""
        found = self.unopenable(step, index)
        if found.size == 0:
            self.sizes.note(found.inode)
        return found

    def above(self, inode: int) -> Attributes | None:
        """The directory above an inode; None if either does not exist."""
        node = node_of(inode)
        if node is None:
            return None
        if isinstance(node, SliceFile):
            return self.attributes(directory_inode(node.step))
        above = {StepFile: Fixed.STEPS, WaitFile: Fixed.WAIT}.get(type(node), Fixed.ROOT)
        return self._fixed(Fixed.CONTROL if node in {Fixed.STEPS, Fixed.WAIT, Fixed.ORDER} else above)

    def attributes(self, inode: int) -> Attributes | None:
        """Attributes of an inode without waiting; None if it does not exist or is not in memory."""
        node = node_of(inode)
        if isinstance(node, StepDirectory):
            gone = self.tree.presence(node.step) is Presence.ABSENT
            return None if gone else attributes.step_directory(self.reader, self.tree, node.step)
        if isinstance(node, SliceFile):
            if node.index < self.ranks.grid.slices and self.tree.names_known(node.step):
                return self.looked_up_unopenable(node.step, node.index)
            entry = self.files.entry_of(node.step, node.index) or self.reader.entry_if_loaded(node.step)
            return None if entry is None else self.of_slice(entry, node)
        if isinstance(node, StepFile | WaitFile):
            return self.control.numbered(node)
        return None if node is None else self._fixed(node)

    def of_slice(self, entry: StepEntry, node: SliceFile) -> Attributes | None:
        """A committed slice; None if the step has no such slice."""
        if node.index >= entry.tgb.slices:
            return None
        return self.of_index(entry, node.index)

    def of_index(self, entry: StepEntry, index: SliceIndex) -> Attributes:
        """A slice that the committed step has."""
        return attributes.slice_file(entry, index, self.ranks.links)

    def _fixed(self, node: Fixed) -> Attributes | None:
        if node is Fixed.ROOT:
            return attributes.root(self.reader)
        if node is Fixed.LATEST:
            newest = self.tree.latest()
            return None if newest is None else attributes.latest(self.reader, newest)
        return self.control.fixed(node)


@guarded
@read_only
@dataclass(eq=False, kw_only=True)
class StepOperations(pyfuse3.Operations):
    """The handlers of one mount."""

    reader: LogReader
    tree: Tree
    names: FileNames
    slices: Slices
    waits: Waits
    control: Control
    meter: Meter
    known: LookupCounts
    files: FileTable
    sizes: PendingSizes = field(default_factory=PendingSizes)
    is_own: Callable[[int], bool] = lambda _pid: False  # whether the pid is of this daemon
    readdir_reply: ReaddirReply = pyfuse3.readdir_reply

    supports_dot_lookup = True

    def __post_init__(self) -> None:
        self._replies = Replies()
        self._waiting = Shares(_WAITING_MAX, errno.EAGAIN)
        self._attributes = KnownAttributes(
            self.reader, self.tree, self.names.ranks, self.control, self.files, self.sizes
        )

    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = node_of(parent_inode)
        if name == b".":
            found: Attributes | None = await self._lookup_handle(parent_inode, ctx)
        elif name == b"..":
            found = self._attributes.above(parent_inode)
        elif parent is Fixed.ROOT:
            found = self._attributes.in_root(name)
        elif isinstance(parent, StepDirectory):
            found = await self._lookup_in_step(parent.step, name, ctx)
        elif isinstance(parent, Fixed):
            found = self.control.lookup(parent, name, ctx.uid, ctx.pid)
        else:
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        if found is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        self._count(found)
        return self._replies.entry(found)

    async def _lookup_in_step(self, step: Step, name: bytes, ctx: pyfuse3.RequestContext) -> Attributes | None:
        index = self.names.slice_of(name)
        if index is None:
            return None  # at once: a wrong name does not wait for the step
        if self.tree.names_known(step):
            return self._attributes.looked_up_unopenable(step, index)
        entry = await self._entry(step, ctx)
        return self._attributes.of_index(entry, index)

    async def _lookup_handle(self, inode: int, ctx: pyfuse3.RequestContext) -> Attributes | None:
        """Look up an inode that the kernel has forgotten, from an NFS client's file handle; ENOENT becomes ESTALE.

        Stricter than GETATTR: a file that has left the view is found only while it is open. And it waits for an index
        segment, because a handle outlives the mount that issued it.
        """
        node = node_of(inode)
        if not isinstance(node, SliceFile) or self.tree.names_known(node.step):
            return self._attributes.attributes(inode)
        entry = self.files.entry_of(node.step, node.index) or await self._entry(node.step, ctx)
        return self._attributes.of_slice(entry, node)

    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        found = self._attributes.attributes(inode)
        node = node_of(inode)
        if found is None and isinstance(node, SliceFile):
            entry = await self._entry(node.step, ctx)
            found = self._attributes.of_slice(entry, node)
        if found is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._replies.entry(found)

    async def readlink(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileNameT:
        del ctx
        newest = self.tree.latest()
        if inode != Fixed.LATEST or newest is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return step_name(newest)

    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        opened = await self._open_directory(inode, ctx)
        return self.files.directories.add(inode, opened, uid=ctx.uid)

    async def _open_directory(self, inode: int, ctx: pyfuse3.RequestContext | None) -> OpenDirectory:
        node = node_of(inode)
        directory: OpenDirectory | None
        if node is Fixed.ROOT:
            directory = OpenRoot(self.reader, self.tree, self.control.directory, self.known)
        elif isinstance(node, StepDirectory):
            directory = await self._open_step_directory(node.step, ctx)
        else:
            directory = self.control.opendir(node)
        if directory is None:
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        return directory

    async def _open_step_directory(self, step: Step, ctx: pyfuse3.RequestContext | None) -> OpenDirectory:
        # Listing never waits under --steps: the names are known.
        pending = self.tree.options.steps is not None and self.tree.presence(step) is Presence.PENDING
        if pending or self.tree.released(step):
            return OpenStep(partial(self._attributes.unopenable, step), self.names)
        return OpenStep(partial(self._attributes.of_index, await self._entry(step, ctx)), self.names)

    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        opened = self.files.directories.get(fh)
        if opened is None:  # another daemon opened it
            again = await self._open_directory(inode_of(fh), None)
            opened = self.files.directories.put_once(fh, again)
        opened.list_after(start_id, Rows(self._replies, self.readdir_reply, token))

    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        self.files.directories.pop(fh)

    async def open(self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & _WRITING:
            raise pyfuse3.FUSEError(errno.EROFS)
        node = node_of(inode)
        if isinstance(node, SliceFile):
            return await self._open_rank(inode, node, ctx)
        if not isinstance(node, StepFile | WaitFile):
            self.files.check_room(ctx.uid)
            opened = self.control.open(node, ctx.uid)
        else:
            with self._waiting.held(ctx.uid), self.slices.shelter.wait():
                if isinstance(node, StepFile):
                    opened = await self.control.open_step(await self._entry(node.step, ctx))
                else:
                    opened = await self.control.open_wait(node.step, ctx.pid)
        handle = self.files.add(inode, opened, length=len(opened.content), uid=ctx.uid)
        return pyfuse3.FileInfo(fh=handle, direct_io=True)

    async def _open_rank(self, inode: int, node: SliceFile, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Open a rank's file."""
        own = self.is_own(ctx.pid)
        try:
            entry = await self._entry(node.step, ctx)
        except OtherHistoryError:
            if not self.tree.readable(node.step) or self.sizes.has(inode):
                raise
            # The daemon before showed this step, which the store has lost: its pages are all that there is.
            return pyfuse3.FileInfo(fh=self.files.add(inode, OpenUnread(), own=own), keep_cache=True)
        if node.index >= entry.tgb.slices:
            raise pyfuse3.FUSEError(errno.ENOENT)
        if self.files.closing and not own:  # its own look would keep the mount busy
            with self._waiting.held(ctx.uid), self.slices.shelter.wait():
                await self.files.pass_door()
        file, size = self._open_slice(entry, node, own=own), entry.tgb.length(node.index)
        if self.sizes.has(inode):
            try:
                with self._waiting.held(ctx.uid), self.slices.shelter.wait():
                    await self.sizes.settle(inode, size, lambda: file.read(size - 1, 1))
            except BaseException:
                file.close()
                raise
        # Counted only now: while it waits, the kernel may have another daemon answer it. direct_io would break
        # MAP_SHARED: np.memmap, safetensors.
        if not own:
            self.files.note_opener(ctx.pid)
        return pyfuse3.FileInfo(fh=self.files.add(inode, file, own=own), keep_cache=True)

    def _open_slice(self, entry: StepEntry, node: SliceFile, *, own: bool) -> OpenFile:
        if own:
            return OpenUnread()
        self.meter.note_open(node.step)
        rank = self.names.ranks.reader_of(node.index)[0]
        return OpenSlice(self.slices.open(entry, node.index), entry, node.index, rank)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        file = self.files.get(fh)
        if file is None:
            with self.slices.shelter.wait():
                file = await self.open_again(fh, off)
        data = await file.read(off, size)
        self.meter.bytes_read += len(data)
        return data  # type: ignore[return-value]  # any contiguous buffer: pyfuse3 takes it without a copy

    async def open_again(self, fh: int, offset: int = 0) -> OpenFile:
        """The file behind a handle that another daemon gave. Errno EIO for contents that may be others by now."""
        node = node_of(inode_of(fh))
        file: OpenFile
        if isinstance(node, SliceFile):  # of a step that has left the view, too: its reader opened it before
            file = self._open_slice(await self._loaded(node.step), node, own=bool(fh & 1))
        elif isinstance(node, WaitFile):
            file = OpenContent(step_name(node.step) + b"\n")
        else:
            step = await self._loaded(node.step) if isinstance(node, StepFile) else None
            file = made = self.control.open(node) if step is None else await self.control.open_step(step)
            length = length_of(fh) if step is None else len(made.content)
            if offset:
                if offset < length:
                    raise pyfuse3.FUSEError(errno.EIO)
                return OpenContent(b"")
            # A reader may ask for what follows these contents at a daemon that knows the length alone.
            made.content = made.content.ljust(length, b"\n")
        kept = self.files.put_once(fh, file)
        if kept is not file:
            file.close()
        return kept

    def inherit(self, files: Iterable[tuple[int, int, str | None]]) -> None:
        """Open what the daemon before had open, as far as the index is in memory; the rest when it is used."""
        for handle, times, content in files:
            node = node_of(inode_of(handle))
            if content is not None:
                opened = OpenContent(base64.b64decode(content))
                for _ in range(times):
                    self.files.put(handle, opened)
            elif isinstance(node, SliceFile) and (entry := self.reader.entry_if_loaded(node.step)) is not None:
                for _ in range(times):
                    self.files.put(handle, self._open_slice(entry, node, own=False))

    async def _loaded(self, step: Step) -> StepEntry:
        found = self.reader.entry_if_loaded(step) or await self.waits.for_entry(step, 0)
        if isinstance(found, WaitOutcome):
            raise pyfuse3.FUSEError(errno.EIO)  # of an open file
        return found

    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        self.files.release(fh)

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        for inode, count in inode_list:
            node = node_of(inode)
            if isinstance(node, StepDirectory):
                self.known.forget(node.step, count)
            elif isinstance(node, SliceFile):
                self.sizes.forget(inode)

    async def access(self, inode: pyfuse3.InodeT, mode: pyfuse3.ModeT, ctx: pyfuse3.RequestContext) -> bool:
        """Never called under default_permissions: everything here is 0444 or 0555."""
        del inode, ctx
        return not mode & os.W_OK

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        del ctx
        state = self.reader.state
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = _STATFS_BLOCK_BYTES
        data.f_blocks = -(-state.total_bytes // _STATFS_BLOCK_BYTES)
        data.f_bfree = data.f_bavail = 0
        data.f_files = len(self.tree.listed()) * (1 + self.reader.identity.slices)
        data.f_ffree = data.f_favail = 0
        data.f_namemax = _NAME_BYTES_MAX
        return data

    async def _entry(self, step: Step, ctx: pyfuse3.RequestContext | None) -> StepEntry:
        """The entry of a step whose files may be opened; waits for it as its presence allows, or raises an errno.

        `ctx`: None for a handle that another daemon gave.
        """
        entry = self.reader.entry_if_loaded(step) if self.tree.readable(step) else None
        if entry is not None:
            return entry  # nearly always
        pid, uid = (ctx.pid, ctx.uid) if ctx is not None else (0, 0)
        with self._waiting.held(uid), self.slices.shelter.wait():
            found = await self.waits.for_files(step, pid)
        if isinstance(found, WaitOutcome):
            raise refusal(found, expired_errno=self.waits.expired_errno)
        return found

    def _count(self, found: Attributes) -> None:
        node = node_of(found.inode)
        if isinstance(node, StepDirectory):
            self.known.add(node.step)
