"""Every ending leaves no mount, process, socket, cache or record; the group's last checkpoint stands in the lake."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import servers
import trio
from endings import ENDINGS, assert_nothing_is_left, nodes_of, save
from lakework import list_groups
from realmount import PATIENCE_S, mounted, payload, running, until

from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store


def kept_by(lake, group):
    async def read():
        store = open_store(lake)
        return (await list_groups(store, await open_lake(store)))[group].kept

    return trio.run(read)


def sockets_of(pid):
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(link))
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}


def listed_sockets():
    """Inodes of the sockets that this machine has, but for those in TIME_WAIT."""
    columns = {"tcp": 9, "tcp6": 9, "unix": 6}
    rows = {name: Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in columns}
    return {row.split()[columns[name]] for name in columns for row in rows[name]} - {"0"}


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


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left(lake, tmp_path, ending):
    checkpoints, base = tmp_path / "ckpt", tmp_path / "cache-of-this"
    checkpoints.mkdir()
    (port,) = servers.free_ports(1)
    options = ["--group", "run", "--checkpoint-dir", str(checkpoints), "--wait", "600"]
    options += ["--cache-dir", str(base), "--metrics-port", str(port)]
    with mounted(lake, tmp_path / "m", *options) as mount:
        mount.options, mount.config_before = options, mount.config()  # type: ignore[attr-defined]
        assert mount.cache_dir.is_relative_to(base)
        assert mount.cache_dir.exists()
        for step in range(2):
            assert mount.file(step, 0).read_bytes() == payload(step, 0)
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
        until(lambda: nodes_of(lake), "the mount does not say that it is here")
        assert [node.pid for node in nodes_of(lake)] == [mount.pid]
        save(checkpoints, 2)  # and the trainer ends before anybody has looked
        sockets = listed_sockets() & sockets_of(mount.pid)
        assert sockets
        ENDINGS[ending](mount)
        if ending.startswith(("stepfs", "kill")):  # they wait
            assert not running(mount.pid)
            assert not mount.cache_dir.exists()
        assert_nothing_is_left(mount)
        assert not base.exists()
        assert processes_that_name(mount.directory) == []
        assert not sockets & listed_sockets()
        assert nodes_of(lake) == []
        assert kept_by(lake, "run") == ((2, 3) if "--checkpoint" in ending else (2,))


def test_a_daemon_keeps_no_directory_busy_and_no_terminal(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--no-prime") as mount:
        process = Path(f"/proc/{mount.pid}")
        assert b"stepfs.mount.daemon" in (process / "cmdline").read_bytes()
        assert os.readlink(process / "cwd") == "/"
        assert os.getsid(mount.pid) == mount.pid
        assert {os.readlink(process / f"fd/{number}") for number in (1, 2)} == {str(mount.log)}
