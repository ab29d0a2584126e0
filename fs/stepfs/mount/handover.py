"""One daemon takes a mount over from another, while its readers read.

    the next one                                          the one that serves
    connects                                              → the device, and its papers; it serves on
    opens the lake, introduces itself to its libfuse
    → go                                                  begins no slice ahead; → what it has seen
    follows the lake up to there; → seen                  stops reading, writes its papers; → yours
    reads; a listing answers; → serving                   → given; answers what it had read; → done, ends

If the next one fails before `serving`, the other reads on. If that one dies before `done`, the kernel sends again what it
had not answered. After a death the guardian speaks for the dead one, or systemd, which says nothing.

The papers are a file without a name: a line of facts, and the state (`mount/state.py`).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from stepfs import __version__
from stepfs.errors import RefusedError, command
from stepfs.mount.fuse.link import Link, has_ended
from stepfs.mount.host.cache_directory import CachePlace
from stepfs.mount.host.messages import receive, send
from stepfs.mount.host.mount_points import FSTYPE, Mounted, is_dead, mount_at
from stepfs.mount.state import OWNER_BYTES
from stepfs.own_directory import home, make_own

if TYPE_CHECKING:
    from stepfs.mount.options import MountOptions

_log = logging.getLogger("stepfs.mount")

PROTOCOL: Final = 3
ANSWER_S: Final = 10.0  # for each answer of the other side
SETTLE_S: Final = 4.0  # what is being fetched ahead comes, and into the page cache, before a mount is given away
DRAIN_S: Final = 5.0  # what a daemon that was replaced has not answered by then is sent to the next one, if that can be
_RESTART_S: Final = 5.0  # a daemon that was killed may be followed by another within that time
COUNTS: Final = ("generation", "handovers", "recoveries")
_KEPT: Final = ("stepfs-device", "stepfs-papers")
_FIRST_KEPT: Final = 3  # descriptor, as systemd passes them
_SUPERVISOR: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC")
_ROOTS: Final = Path("/run/stepfs")


def place() -> Path:
    """The directory of the sockets: whoever connects gets the descriptor that answers all reads."""
    if os.geteuid() == 0:
        return _ROOTS
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) if runtime else home() / ".local/state/stepfs") / ("stepfs" if runtime else "run")


@contextmanager
def _name_in(directory: Path, mount: str) -> Iterator[Path]:
    """The path of the socket, too short to be refused, in a directory that nobody exchanges. OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    parent = make_own(directory)
    try:
        yield Path(f"/proc/self/fd/{parent}/{mount.replace(':', '-')}.sock")
    finally:
        os.close(parent)


@contextmanager
def listening(mount: str) -> Iterator[socket.socket | None]:
    """A socket to which the next daemon of the mount ("0:53") connects; None if there can be no such place."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            with _name_in(place(), mount) as name:
                fresh = _beside(name)
                sock.bind(str(fresh))
                sock.listen()
                own = fresh.stat().st_ino
                fresh.rename(name)
                _remove_dead(name.parent)
        except OSError as error:
            _log.info("this daemon cannot be replaced while it serves: %s: %s", place(), error.strerror or error)
            yield None
            return
        try:
            yield sock
        finally:
            with suppress(OSError), _name_in(place(), mount) as name:
                _remove(name, lambda found: found.stat().st_ino == own)  # else it is the next one's


def _beside(name: Path) -> Path:
    """A name of nobody else's, also of none whose pid is the same in another container."""
    return name.with_suffix(f".{secrets.token_hex(4)}")


def _remove(name: Path, is_it: Callable[[Path], bool]) -> None:
    """Remove the socket if `is_it`: not the one that another daemon puts in its place meanwhile. OSError."""
    if is_it(name):
        taken = _beside(name)
        name.rename(taken)
        if not is_it(taken):
            with suppress(FileExistsError):  # a third one's
                name.hardlink_to(taken)
        taken.unlink()


def _remove_dead(directory: Path) -> None:
    """Sockets of daemons that were killed, and that nobody followed."""
    for name in directory.glob("*.sock"):
        with suppress(OSError):
            _remove(name, _is_dead)


def _is_dead(name: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)  # one that is stopped may have many who wait
        try:
            sock.connect(str(name))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def is_friend(peer: socket.socket) -> bool:
    """Whether the other side is of this user, or root."""
    return credentials(peer)[1] in {0, os.geteuid()}


def credentials(peer: socket.socket) -> tuple[int, int]:
    """Its pid and user id."""
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


async def heard(
    peer: socket.socket, within_s: float = ANSWER_S, life: int | None = None
) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors; an empty one if the other side has ended, or says nothing in time.

    `life`: of the other side, as `life_of` has it. Else a killed one counts as ended once all its threads are gone.
    """

    async def wait(what: socket.socket | int) -> None:
        await trio.lowlevel.wait_readable(what)
        nursery.cancel_scope.cancel()

    with trio.move_on_after(within_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, peer)
            if life is not None:
                nursery.start_soon(wait, life)
    return receive(peer) if _is_readable(peer.fileno()) else ({}, [])


def _is_readable(descriptor: int, within_s: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def view_of(options: MountOptions) -> dict[str, str]:
    """The options that both daemons must have in common."""
    steps = options.steps
    asked = {"world": options.world, "mesh": options.mesh, "steps": steps and f"{steps.start}:{steps.stop}"}
    return {name: "(none)" if value is None else str(value) for name, value in asked.items()}


def facts_of(link: Link, options: MountOptions, lake_id: str, **others: object) -> dict[str, Any]:
    """What a daemon tells the next one of itself and of the mount. How it is supervised, too: that one is, as well."""
    return {
        "protocol": PROTOCOL, "pid": os.getpid(), "version": __version__, "mount": link.mount,
        "init": link.init.hex(), "reply": link.reply.hex(), "lake_id": lake_id, "view": view_of(options),
        "supervisor": {name: os.environ[name] for name in _SUPERVISOR if name in os.environ}, **others,
    }  # fmt: skip


def write_facts(descriptor: int, facts: dict[str, Any]) -> None:
    body = b"%b\n" % json.dumps(facts).encode()
    assert len(body) <= OWNER_BYTES
    os.pwrite(descriptor, body, 0)


def _read_facts(descriptor: int) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(os.pread(descriptor, OWNER_BYTES, 0).partition(b"\n")[0])
    return facts


@contextmanager
def life_of(pid: int, thread: int) -> Iterator[int | None]:
    """A descriptor that is readable once a daemon has been killed; None if it is gone already.

    It is that of its idle `thread`. A process whose other threads wait for the mount that it was to answer does not end.
    """
    descriptor, numbers = None, [(pid, 0)]
    if Path(f"/proc/{pid}/task/{thread}").exists():  # else it is gone, or has another number in this container
        numbers.insert(0, (thread, os.O_EXCL))  # PIDFD_THREAD, which older kernels do not know
    for number, flags in numbers:
        with suppress(OSError):
            descriptor = os.pidfd_open(number, flags)
            break
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def end(pid: int, life: int | None) -> None:
    """Kill the daemon that was to take over, and return once it reads no more."""
    if life is not None:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        _is_readable(life, ANSWER_S)


@dataclass(eq=False)
class Predecessor:
    """The daemon before this one."""

    sock: socket.socket | None  # to it, or to the guardian of a dead one
    held: list[int]  # the device, the papers, and the lock of its cache directory
    crashed: bool = False

    def __post_init__(self) -> None:
        self.device, self.papers, *self.lock = self.held
        self.facts = _read_facts(self.papers)
        os.environ.update(self.facts["supervisor"])

    def succeeded(self) -> dict[str, int]:
        """How many daemons there were, the next one's count."""
        count = {name: self.facts[name] for name in COUNTS}
        count["generation"] += 1
        count["recoveries" if self.crashed else "handovers"] += 1
        return count

    @classmethod
    def of_dead(cls, number: int) -> Predecessor:
        """The guardian speaks over descriptor `number`."""
        sock = socket.socket(fileno=number)
        return cls(sock, receive(sock)[1], crashed=True)

    @classmethod
    def kept(cls, options: MountOptions) -> Predecessor | None:
        """The dead one of this unit whose device and papers systemd has kept; None if they are of no use."""
        names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
        if os.environ.pop("LISTEN_PID", "") != str(os.getpid()):
            return None
        held = {name: number for number, name in enumerate(names, _FIRST_KEPT)}
        for number in held.values():
            os.set_inheritable(number, False)
        if {*_KEPT} <= {*held}:
            found, at = cls(None, [held[name] for name in _KEPT], crashed=True), mount_at(options.directory)
            is_here = at is not None and at.device == found.facts["mount"] and not has_ended(found.device)
            if is_here and found.facts["view"] == view_of(options):
                return found
        for number in held.values():
            os.close(number)
        return None

    @classmethod
    def at(cls, options: MountOptions) -> Predecessor | None:
        """The daemon that serves a mount point; None if nothing, or a dead mount, is there. `RefusedError`."""
        directory = options.directory
        mounted = mount_at(directory)
        if mounted is None or mounted.fstype != FSTYPE or is_dead(mounted):
            return None
        if mounted.user not in {None, os.geteuid()}:
            raise RefusedError(f"{directory}: user {mounted.user} mounted it; replace its daemon as that user")
        sock = _connected(directory, mounted)
        try:
            said, descriptors = receive(sock)
        except TimeoutError:
            said, descriptors = {}, []
        if said.get("protocol") != PROTOCOL or not descriptors:
            raise _cannot(directory, "its daemon's version gives a mount away in another manner, or is busy")
        sock.settimeout(None)
        found = cls(sock, descriptors)
        found._check(directory, view_of(options))
        return found

    def _check(self, directory: Path, asked: dict[str, str]) -> None:
        for name, was in self.facts["view"].items():
            if was != asked[name]:
                raise RefusedError(
                    f"{directory}: mounted with --{name} {was}, not {asked[name]}: its readers' names would mean other"
                    f" bytes; `{command('stepfs', 'unmount', directory)}` first"
                )

    def check_lake(self, directory: Path, lake_id: str) -> None:
        """`RefusedError` for another lake."""
        was = self.facts["lake_id"]
        if was != lake_id:
            raise RefusedError(
                f"{directory}: lake {was} is mounted here, not {lake_id}; `{command('stepfs', 'unmount', directory)}` first"
            )

    def link(self) -> Link:
        """This daemon's own to the same device; its number is free."""
        init, reply = bytes.fromhex(self.facts["init"]), bytes.fromhex(self.facts["reply"])
        return Link(os.dup(self.device), self.device, init, reply, mount=self.facts["mount"], owner=False)

    def cache(self, cache_dir: Path | None) -> CachePlace | None:
        """Its cache, if this daemon's is to be there, too."""
        if self.facts["cache"] is None or not self.lock or cache_dir is None:
            return None
        path, keep_base = Path(self.facts["cache"][0]), self.facts["cache"][1]
        return CachePlace.inherited(path, self.lock[0], keep_base=keep_base) if path.is_relative_to(cache_dir) else None

    async def give(self, thread: int, descriptors: list[int], see: Callable[[int], Awaitable[int]]) -> bool:
        """Ask for the mount; whether the guardian watches `thread` from now on. `see` follows the log up to a
        version, and returns the one that it came to. `RefusedError`; the errors of `see`.
        """
        said: dict[str, Any] = {"yours": True, "guarded": False}
        if self.sock is not None:
            send(self.sock, {"go": True, "thread": thread}, descriptors)
            said, _ = await heard(self.sock)
            while "version" in said:
                send(self.sock, {"seen": await see(said["version"])})
                said, _ = await heard(self.sock)
        if "yours" not in said:
            why = said.get("refused", "its daemon does not give it away; look at its log")
            raise RefusedError(f"the mount is as it was: {why}")
        return bool(said["guarded"])


def keep(link: Link, papers: int) -> None:
    """Have systemd keep what the next daemon of this unit needs, if it is systemd that watches this one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, suppress(OSError):
        sock.connect(address.replace("@", "\0", 1))
        for name, descriptor in zip(_KEPT, (link.device, papers), strict=True):
            sock.send(b"FDSTOREREMOVE=1\nFDNAME=%b" % name.encode())
            socket.send_fds(sock, [b"FDSTORE=1\nFDNAME=%b" % name.encode()], [descriptor])


def _connected(directory: Path, mounted: Mounted) -> socket.socket:
    until = time.monotonic() + _RESTART_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(ANSWER_S)
        try:
            with _name_in(place(), mounted.device) as name:
                sock.connect(str(name))
            if not is_friend(sock):
                raise PermissionError(0, "another user listens there")
        except (ConnectionRefusedError, FileNotFoundError) as error:  # killed; another one may be about to follow
            sock.close()
            if time.monotonic() > until:
                raise _cannot(directory, "its daemon listens nowhere: it is gone, or of an older version") from error
            time.sleep(0.05)
        except OSError as error:
            sock.close()
            raise RefusedError(
                f"{place()}: {error.strerror or error}; it must be this user's own, with mode 0700"
            ) from error
        else:
            return sock


def _cannot(directory: Path, why: str) -> RefusedError:
    return RefusedError(
        f"{directory} cannot be taken over: {why}; `{command('stepfs', 'unmount', directory)}`, and mount again"
    )
