"""Every way a mount can end, done to a `realmount.Mount`, and what must be gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import trio
from finished import ran
from realmount import PATIENCE_S, ended, gone, mounted, stepfs, until

from stepfs.lake.fleet import list_nodes
from stepfs.lake.identity import open_lake
from stepfs.mount.host import mount_table
from stepfs.store.opening import open_store


def assert_nothing_is_left(mount):
    ended(mount)
    assert mount_table.mount_at(mount.directory) is None
    assert os.listdir(mount.directory) == []
    until(lambda: not mount.cache_dir.exists(), f"{mount.cache_dir} is still there")


def end_lazily_though_busy(mount):
    with mount.file(2, 0).open("rb"):
        ENDINGS["umount -l"](mount)
        gone(mount.pid)


def seal_then_unmount(mount):
    """Who waits for a step that will never come is told so at once."""
    code = "import sys; open(sys.argv[1])"
    waiter = subprocess.Popen([sys.executable, "-c", code, str(mount.file(9, 0))], stderr=subprocess.PIPE, text=True)
    until(lambda: mount.status()["waiting"] == 1, "nobody waits")
    stepfs("seal", mount.config()["lake"]).check_returncode()
    assert "FileNotFoundError" in waiter.communicate(timeout=PATIENCE_S)[1]
    assert mount.status()["sealed"] is True
    ENDINGS["stepfs unmount"](mount)


def kill_then_mount_again(mount):
    mount.kill(signal.SIGKILL)
    gone(mount.pid)
    assert len(nodes_of(mount.config_before["lake"])) == 1  # nobody could take it away
    with mounted(mount.config_before["lake"], mount.directory, *mount.options) as second:
        second.file(1, 0).read_bytes()  # training goes on; the killed one took along how far its readers were
        ENDINGS["stepfs unmount"](second)


def kill_then_unmount(mount):
    """Another daemon follows at once, with the cache; where the kernel cannot do that, the mount is dead."""
    mount.kill(signal.SIGKILL)
    gone(mount.pid)
    with suppress(OSError):
        mount.file(1, 0).read_bytes()  # training goes on, as above
        mount.pid = mount.config()["pid"]
    ENDINGS["stepfs unmount"](mount)


def run_though_busy(*command):
    """The daemon's own look at what it primes keeps the mount for a moment; so does another process's at all mounts."""
    done = []

    def taken_away():
        done[:] = [ran(command, timeout=PATIENCE_S)]
        return done[0].returncode == 0 or "busy" not in done[0].stderr.lower()

    until(taken_away, "the mount stays busy")
    assert done[0].returncode == 0, done[0].stderr


ENDINGS = {
    "SIGTERM": lambda m: m.kill(signal.SIGTERM),
    "SIGINT": lambda m: m.kill(signal.SIGINT),
    "SIGHUP": lambda m: m.kill(signal.SIGHUP),
    "fusermount3": lambda m: run_though_busy("fusermount3", "-u", str(m.directory)),
    "umount": lambda m: run_though_busy("umount", str(m.directory)),
    "umount -l": lambda m: subprocess.run(["umount", "-l", str(m.directory)], check=True, timeout=PATIENCE_S),
    "umount -l, busy": end_lazily_though_busy,
    "stepfs unmount": lambda m: stepfs("unmount", m.directory).check_returncode(),
    "stepfs unmount --checkpoint": lambda m: stepfs("unmount", m.directory, "--checkpoint", "3").check_returncode(),
    "stepfs seal": seal_then_unmount,
    "kill -9, and the next mount": kill_then_mount_again,
    "kill -9, and stepfs unmount": kill_then_unmount,
}


def nodes_of(lake):
    async def read():
        store = open_store(lake)
        return await list_nodes(store, await open_lake(store), ["run"])

    return trio.run(read)


def save(checkpoints, counter):
    """As `torch.distributed.checkpoint` does, `.metadata` last."""
    directory = checkpoints / f"step-{counter}"
    directory.mkdir()
    (directory / "__0_0.distcp").write_bytes(b"weights")
    (directory / ".metadata").write_bytes(b"metadata")


def processes_that_name(directory):
    """Command lines in which the directory occurs, but for those of tests."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if os.fsencode(directory) in line and b"pytest" not in line.split(b"\0")[0:4]:
            found.append(line)
    return found
