"""Where the keeper of a mount listens: a socket in a directory of its user alone, named by the kernel's boot and the device."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepfs._internal.own_directory import home, make_own, open_own

_ROOTS = Path("/run/stepfs")
_SO_PEERPIDFD = 77  # the same on every architecture that we know
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def places() -> list[Path]:
    """The directories of the sockets, the one that a keeper uses first: whoever connects may have any program serve."""
    if os.geteuid() == 0:
        return [_ROOTS]
    runtime = Path(f"/run/user/{os.geteuid()}")  # not by a variable of the moment
    return [*([runtime / "stepfs"] if runtime.is_dir() else []), home() / ".local/state/stepfs/run"]


def name_of(device: str) -> str:
    """Of the socket of the mount "0:53": a home may be on NFS, and a device has its number until the next boot."""
    return f"{_BOOT.read_text()[:13].replace('-', '')}-{device.replace(':', '-')}.sock"


@contextmanager
def _named(directory: Path, name: str, *, make: bool = False) -> Iterator[Path]:
    """The path of the socket, too short to be refused, in a directory that nobody exchanges. OSError."""
    if make:
        directory.parent.mkdir(parents=True, exist_ok=True)
    parent = make_own(directory) if make else open_own(directory)
    try:
        yield Path(f"/proc/self/fd/{parent}/{name}")
    finally:
        os.close(parent)


def listen(device: str) -> socket.socket:
    """OSError where there is no place."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _named(places()[0], name_of(device), make=True) as name:
            fresh = _beside(name)
            sock.bind(str(fresh))
            sock.listen()
            sock.setblocking(False)
            fresh.rename(name)
            _remove_dead(name.parent)
    except OSError:
        sock.close()
        raise
    return sock


def is_there(device: str) -> bool:
    """Whether a socket has the name of this mount: somebody may have tidied up."""
    return (places()[0] / name_of(device)).exists()


def leave(device: str, sock: socket.socket) -> None:
    """Remove the socket of a mount that is gone, unless another mount has the number and the name by now."""
    sock.close()
    with suppress(OSError), _named(places()[0], name_of(device)) as name:
        _remove(name, _is_dead)


def connect(device: str, within_s: float, said: Path | None = None) -> socket.socket | None:
    """A connection to the keeper of a mount; None if it listens nowhere. `said`: where, by the mount itself.
    `PermissionError`: another user listens there.
    """
    for directory in places() if said is None else [said]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(within_s)
        try:
            with _named(directory, name_of(device)) as name:
                sock.connect(str(name))
        except (ConnectionRefusedError, FileNotFoundError):
            sock.close()
            continue
        except OSError:
            sock.close()
            raise
        if peer_of(sock)[1] not in {0, os.geteuid()}:
            sock.close()
            raise PermissionError(0, "another user listens there")
        return sock
    return None


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Its pid, 0 from another pid namespace, and its user id."""
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def process_of(sock: socket.socket) -> int | None:
    """A pidfd of the process at the other end, in whatever pid namespace it is; None before Linux 6.5."""
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    return None


def _beside(name: Path) -> Path:
    """A name of nobody else's, also of none whose pid is the same in another container."""
    return name.with_suffix(f".{os.urandom(4).hex()}")


def _remove(name: Path, is_it: Callable[[Path], bool]) -> None:
    """Remove the socket if `is_it`: not the one that another keeper puts in its place meanwhile. OSError."""
    if is_it(name):
        taken = _beside(name)
        name.rename(taken)
        if not is_it(taken):
            with suppress(FileExistsError):  # a third one's
                name.hardlink_to(taken)
        taken.unlink()


def _remove_dead(directory: Path) -> None:
    """Sockets of keepers that were killed."""
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
