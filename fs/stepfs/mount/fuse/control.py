"""`.stepfs/`: facts about the mount and its steps, as files that any tool can read, and names that ask something of it.

All use direct I/O with size 0, like /proc: the content is made when a file is opened and stays the same until it is
closed, so a reader never sees a mixture of two moments.
"""

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pyfuse3

from stepfs.data.announced_orders import parse_hint
from stepfs.data.prefetch import Prefetcher
from stepfs.errors import UsageError
from stepfs.follow.waits import WaitOutcome, Waits
from stepfs.format.ids import Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.log.reader import LogReader
from stepfs.mount.fuse.files import FileTable, OpenContent, OpenDirectory, OpenFixed, OpenStepFiles
from stepfs.mount.fuse.guard import refusal
from stepfs.view import attributes
from stepfs.view.attributes import Attributes
from stepfs.view.inodes import Fixed, Node, StepFile, WaitFile, step_file_inode, wait_file_inode
from stepfs.view.names import parse_number, step_name
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.mount")

FILES: Final = {
    b"status.json": Fixed.STATUS,
    b"metrics": Fixed.METRICS,
    b"config.json": Fixed.CONFIG,
    b"accesslog": Fixed.ACCESSLOG,
    b"trace": Fixed.TRACE,
}
DIRECTORIES: Final = {b"steps": Fixed.STEPS, b"wait": Fixed.WAIT, b"order": Fixed.ORDER}
_STEP_SUFFIX: Final = b".json"


@dataclass(eq=False, slots=True)
class Control:
    """The control directory of one mount.

    status.json  metrics  config.json  accesslog      fixed names
    trace                                             opening it traces for some seconds (`tracing.wanted`)
    steps/<step>.json                                 facts of a step's commit; its position is read at open
    wait/<step>                                       reading it blocks until the step is committed
    order/<hint>                                      looking it up announces an order (`take_hint`)
    leave                                             looking it up asks whether the mount may end (`_leave`)
    """

    reader: LogReader
    tree: Tree
    waits: Waits
    files: Mapping[Fixed, Callable[[], str]]  # renders the fixed files
    describe_step: Callable[[StepEntry], Awaitable[str]]  # may request from the store
    opened: FileTable
    now_ms: int  # the time stamp of all
    prefetcher: Prefetcher | None = None  # for announced orders

    def __post_init__(self) -> None:
        assert self.files.keys() >= set(FILES.values())

    @property
    def directory(self) -> Attributes:
        return attributes.control(Fixed.CONTROL, self.now_ms, mode=attributes.DIRECTORY_MODE)

    def lookup(self, parent: Fixed, name: bytes, uid: int, pid: int) -> Attributes | None:
        if parent is Fixed.CONTROL and name == b"leave":
            return self._leave(uid, pid)
        if parent is Fixed.CONTROL:
            node = FILES.get(name) or DIRECTORIES.get(name)
            return None if node is None else self.fixed(node)
        if parent is Fixed.STEPS and name.endswith(_STEP_SUFFIX):
            step = parse_number(name.removesuffix(_STEP_SUFFIX))
            return None if step is None else self.numbered(StepFile(step))
        if parent is Fixed.WAIT:
            step = parse_number(name)
            return None if step is None else self.numbered(WaitFile(step))
        if parent is Fixed.ORDER and self.prefetcher is not None:
            take_hint(self.prefetcher, name, uid)
            return self.fixed(Fixed.HINTED)
        return None

    def fixed(self, node: Fixed) -> Attributes | None:
        if node in DIRECTORIES.values():
            return attributes.control(node, self.now_ms, mode=attributes.DIRECTORY_MODE)
        if node in {Fixed.HINTED, Fixed.LEAVE}:  # not cached, because each lookup says something anew
            return attributes.control(node, self.now_ms, keep_s=0.0)
        if node is Fixed.CONTROL:
            return self.directory
        return attributes.control(node, self.now_ms) if node in self.files else None

    def _leave(self, uid: int, pid: int) -> Attributes | None:
        """`stepfs unmount` asks here first, because the kernel looks for users in its own mount namespace only.

        Errno EBUSY while anybody has something open, waits, or opens file after file, from any namespace; otherwise nobody
        opens a step's file in the next moment. EACCES as for a hint.
        """
        _check_owner(uid)
        if self.waits.waiting or self.opened.in_use() or self.opened.opened_lately(pid):
            raise pyfuse3.FUSEError(errno.EBUSY)
        self.opened.close_door()
        return self.fixed(Fixed.LEAVE)

    def numbered(self, node: StepFile | WaitFile) -> Attributes | None:
        if isinstance(node, WaitFile):
            return attributes.control(wait_file_inode(node.step), self.now_ms, keep_s=attributes.GLANCE_S)
        if not self.tree.readable(node.step):
            return None
        return attributes.control(step_file_inode(node.step), self.reader.time_ms(node.step), keep_s=0.0)

    def opendir(self, node: Node | None) -> OpenDirectory | None:
        """Open a directory of the control tree; `wait/` and `order/` list nothing: their names are endless."""
        if node is Fixed.CONTROL:
            names = {**FILES, **DIRECTORIES}
            listed = [(name, found) for name, n in names.items() if (found := self.fixed(n)) is not None]
            return OpenFixed(listed)
        if node is Fixed.STEPS:
            return OpenStepFiles(self.reader, self.tree)
        return OpenFixed([]) if node in {Fixed.WAIT, Fixed.ORDER} else None

    def open(self, node: Node | None, uid: int = 0) -> OpenContent:
        """Open any file here but a step's. Errno EACCES for a user who may not trace."""
        if node is Fixed.TRACE:
            _check_owner(uid)
        if isinstance(node, Fixed) and node in self.files:
            return OpenContent(self.files[node]().encode())
        raise pyfuse3.FUSEError(errno.EISDIR if isinstance(node, Fixed) else errno.ENOENT)

    async def open_wait(self, step: Step, pid: int) -> OpenContent:
        """Open `wait/<step>` once the step is committed: the content is its directory's name.

        The open waits, not the read: only an open identifies the waiting thread, which can then be released early.
        """
        outcome = await self.waits.for_commit(step, pid)
        if outcome is WaitOutcome.READY:
            return OpenContent(step_name(step) + b"\n")
        raise refusal(outcome, expired_errno=self.waits.expired_errno)

    async def open_step(self, entry: StepEntry) -> OpenContent:
        return OpenContent((await self.describe_step(entry)).encode())


def _check_owner(uid: int) -> None:
    if uid not in {0, os.getuid()}:
        raise pyfuse3.FUSEError(errno.EACCES)


def take_hint(prefetcher: Prefetcher, name: bytes, uid: int) -> None:
    """Accept a hint by the lookup of its name: any container that sees the mount can look names up, and the kernel gives
    the user of each request, but no process can write here.

    Errno EACCES for users other than root and the mounting user, ENOENT for no hint, EINVAL for one that is refused.
    """
    try:
        hint = parse_hint(name.decode("ascii"))
    except (UsageError, UnicodeDecodeError):
        raise pyfuse3.FUSEError(errno.ENOENT) from None
    _check_owner(uid)
    try:
        prefetcher.accept(hint)
    except UsageError as error:
        _log.info("order hint refused: %s", error)
        raise pyfuse3.FUSEError(errno.EINVAL) from None
