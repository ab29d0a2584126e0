"""The descriptor between libfuse and the kernel, which daemons of one mount give to each other.

INIT happens once in the life of a mount. The first daemon records it; each later one shows the record to its own libfuse,
and serves only if that replies the same, byte for byte. All of them hold one open file, so there is one queue of requests
and an answer may come from any of them; but two must never read, and nobody may set O_NONBLOCK.
"""

import contextlib
import os
import select
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

import pyfuse3
import trio
import trio.lowlevel

from stepfs.data.slices import Shelter
from stepfs.errors import RefusedError

TASKS_MAX: Final = 4096  # concurrent requests; with the default, 99, waiting requests would starve all others
TASKS_IDLE: Final = 8
HAS_RESEND: Final = 1 << 7  # of flags2
_FLAGS2: Final = 40 + 16  # in INIT: after the header, the version, read-ahead and flags
_HEADER: Final = 16  # of a reply: length, error, number of the request
_INIT_BYTES_MAX: Final = (1 << 20) + 4096
_RESEND: Final = struct.pack("<IiQ", 16, 7, 0)  # FUSE_NOTIFY_RESEND, without content
_TURNS: Final = 3  # of the loop, in which a reader that has been woken reads one more request


def descriptor_of_libfuse(others: frozenset[int]) -> int:
    """The one that `pyfuse3.init` has opened."""
    (found,) = held() - others
    return found


def held() -> frozenset[int]:
    """This process's descriptors of /dev/fuse."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names only)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").endswith("/fuse"):  # noqa: PTH115 (text)
                found.add(int(name))
    return frozenset(found)


def has_ended(device: int) -> bool:
    """Whether the mount is gone: another one may have its number by now."""
    poll = select.poll()
    poll.register(device, 0)
    return bool(poll.poll(0))


@dataclass(eq=False)
class Link:
    """The kernel's end of one mount. Close the device when libfuse's own descriptor is closed."""

    number: int  # libfuse reads and writes here
    device: int  # another descriptor of the same open file
    init: bytes  # the kernel's INIT
    reply: bytes = b""  # libfuse's reply in the first daemon; without the header
    mount: str = ""  # "0:53"; "" of a passed mount
    owner: bool = True  # whether it is this daemon that unmounts
    shelter: Shelter = field(default_factory=Shelter)

    def __post_init__(self) -> None:
        self._reading = trio.CancelScope()
        self._answered = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._over = trio.Event()  # no reading will begin again

    @property
    def has_resend(self) -> bool:
        """Whether the kernel can send requests again that a daemon has read and not answered."""
        flags = struct.unpack_from("<I", self.init, _FLAGS2)[0] if len(self.init) >= _FLAGS2 + 4 else 0
        return bool(flags & HAS_RESEND)

    def record(self) -> None:
        """Take INIT, which the kernel has sent when it mounted."""
        self.init = os.read(self.device, _INIT_BYTES_MAX)

    async def introduce(self) -> None:
        """Let libfuse answer INIT. `RefusedError` if a later daemon would agree on something else with the kernel."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            os.dup2(theirs.fileno(), self.number, inheritable=False)
            ours.send(self.init)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pyfuse3.main, 1, TASKS_IDLE)
                await trio.lowlevel.wait_readable(ours)
                reply = ours.recv(_INIT_BYTES_MAX)
                nursery.cancel_scope.cancel()
        if not self.reply:
            os.write(self.device, reply)
            self.reply = reply[_HEADER:]
        elif self.reply != reply[_HEADER:]:
            raise RefusedError(
                "this version would agree on something else with the kernel than the mount's daemon did: unmount, and"
                " mount again"
            )

    def attach(self) -> None:
        """Put the kernel in the place where libfuse reads."""
        os.dup2(self.device, self.number, inheritable=False)

    async def answer(self) -> None:
        """Answer the kernel until the mount is gone, or another daemon has it and all that was read is answered."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._read)
            await self._over.wait()

    async def _read(self) -> None:
        """A read of /dev/fuse says ENODEV when the mount is gone, which ends the loop. One that was copying a request at
        that moment says ECONNABORTED instead (once in some thousand unmounts of a busy mount): the same end.
        """
        self._answered = trio.Event()
        with trio.CancelScope() as self._reading:
            try:
                await pyfuse3.main(min_tasks=TASKS_IDLE, max_tasks=TASKS_MAX)
            except* ConnectionAbortedError as ends:
                _, faults = ends.split(_tells_the_end)
                if faults is not None:
                    raise faults from None
        self._answered.set()
        if not self._reading.cancel_called:
            self._over.set()

    async def stop(self) -> None:
        """Read nothing any more; what was read will be answered. No request is lost."""
        self.shelter.close()
        self._reading.cancel()
        for _ in range(_TURNS):
            await trio.lowlevel.checkpoint()

    def leave(self) -> None:
        """After `stop`: another daemon reads on, for good."""
        self.owner = False
        self._over.set()

    async def read_on(self) -> None:
        """Another daemon has failed: what is not answered yet, here or there, is sent again, and read."""
        assert self._nursery is not None
        if self.has_resend:
            self.shelter.close(False)
            self._reading.cancel()
            await self._answered.wait()  # or dropped: a request must not be answered twice
            self.resend()
        self._nursery.start_soon(self._read)

    def resend(self) -> None:
        """Have the kernel send again what was read and not answered."""
        with contextlib.suppress(OSError):  # the mount has ended: the first read says so, too
            os.write(self.device, _RESEND)


def _tells_the_end(error: BaseException) -> bool:
    """Handlers talk to the network, whose ECONNABORTED is a fault; `fuse_session_receive_buf` names the device's."""
    return isinstance(error, ConnectionAbortedError) and str(error.strerror).startswith("fuse_session_receive_buf")
