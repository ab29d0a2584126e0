"""The kernel's end of a mount: pyfuse3's global session as a context, with errors that give advice.

A periodic signal frees the event loop from a read of /dev/fuse that would block for ever.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pyfuse3

from stepfs.errors import RefusedError
from stepfs.mount.host.mountinfo import FSTYPE, mount_at, source_of
from stepfs.mount.host.passed_fd import descriptor_of

_log = logging.getLogger("stepfs.mount")

_DEVICE: Final = Path("/dev/fuse")
_NAMELESS: Final = "could not determine username"  # says fusermount3
TASKS_MAX: Final = 4096  # concurrent requests; with the default, 99, waiting requests would starve all others
TASKS_IDLE: Final = 8


def fuse_options(lake: str, *, allow_other: bool) -> set[str]:
    """Mount options. Never one that would run code or grant rights from a lake's bytes."""
    options = {
        *pyfuse3.default_options,
        f"fsname={source_of(lake)}",
        "subtype=stepfs",
        "ro",
        "nosuid",
        "nodev",
        "noexec",
    }
    return options | {"allow_other"} if allow_other else options


@contextmanager
def mounted(operations: pyfuse3.Operations, directory: Path, options: set[str]) -> Iterator[str]:
    """Mount; yields the device number ("0:53"). On leaving, detach if our mount is still the one at this place.

    A passed mount (`/dev/fd/N`) is only served: its device number is unknown here, and is "".
    """
    if descriptor_of(directory) is not None:
        _init(operations, directory, options)
        try:
            yield ""
        finally:
            pyfuse3.close(unmount=False)
        return
    _check_rights()
    _init(operations, directory, options)
    device = None
    try:
        at = mount_at(directory)
        if at is None or at.fstype != FSTYPE:
            raise RefusedError(f"{directory}: the mount disappeared at once; see `dmesg`")
        device = at.device
        yield device
    finally:
        # Detaching works by path, so only if our mount was not replaced by another one meanwhile.
        top = mount_at(directory)
        pyfuse3.close(unmount=top is not None and top.device == device)


async def answer() -> None:
    """Answer the kernel until the mount is gone or `stop` is called.

    A read of /dev/fuse says ENODEV when the mount is gone, which ends the loop. One that was copying a request at that
    moment says ECONNABORTED instead (once in some thousand unmounts of a busy mount): the same end.
    """
    try:
        await pyfuse3.main(min_tasks=TASKS_IDLE, max_tasks=TASKS_MAX)
    except* ConnectionAbortedError as ends:
        _, faults = ends.split(_tells_the_end)
        if faults is not None:
            raise faults from None


def _tells_the_end(error: BaseException) -> bool:
    """Handlers talk to the network, whose ECONNABORTED is a fault; `fuse_session_receive_buf` names the device's."""
    return isinstance(error, ConnectionAbortedError) and str(error.strerror).startswith("fuse_session_receive_buf")


def stop() -> None:
    """Make `answer` return; its nursery finishes or cancels the current requests."""
    pyfuse3.terminate()


def _check_rights() -> None:
    if not _DEVICE.exists():
        raise RefusedError(
            f"there is no {_DEVICE} here: load the fuse module, or give the container the device (--device /dev/fuse)"
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise RefusedError("mounting without root needs the program fusermount3: install the package fuse3")


def _init(operations: pyfuse3.Operations, directory: Path, options: set[str]) -> None:
    """`pyfuse3.init`; the error contains the text that libfuse writes to stderr."""
    with os.fdopen(os.memfd_create("stepfs-fuse"), "w+b") as said:  # needs no writable file system
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            pyfuse3.init(operations, str(directory), options)
            failure: RuntimeError | None = None
        except RuntimeError as error:
            failure = error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        said.seek(0)
        lines = said.read().decode(errors="replace").split("\n")
    text = "; ".join(line.strip() for line in lines if line.strip())
    if _NAMELESS in text:
        raise RefusedError(
            f"cannot mount on {directory}: user id {os.getuid()} has no name here, and fusermount3 mounts for users with a"
            " name only; add a line for it to /etc/passwd, or mount as root"
        )
    if failure is not None:
        raise RefusedError(
            f"cannot mount on {directory}: {text or failure}; it needs /dev/fuse and, without root, fusermount3"
            " (in a container: --cap-add SYS_ADMIN --device /dev/fuse)"
        ) from failure
    if text:
        _log.info("libfuse: %s", text)


INTERVAL_S: Final = 0.05


@contextmanager
def interrupted_reads(interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Inside the context a system call of the main thread blocks for at most `interval_s`. Main thread only."""
    before = signal.signal(signal.SIGALRM, _nothing)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    pass
