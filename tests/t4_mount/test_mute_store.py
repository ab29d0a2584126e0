"""`stepfs mount` of a store that accepts connections and says nothing: a line soon, exit 6 in bounded time; then no bound."""

from __future__ import annotations

import socket
import subprocess

import pytest
from realmount import STEPFS, change_constants, lake_with, mounted, stepfs, until
from test_outage import ALLOWED, road_to

SAY_S, GIVE_UP_S = 0.3, 1.5
WAITS = "no answer yet"  # what a slow opening says, too
LAKE = "s3://stepfs-tests/lake"
WAITING = f"waiting for {LAKE}: no answer yet; gives up after {GIVE_UP_S:g} s"
GAVE_UP = f"stepfs: {LAKE}: no answer for {GIVE_UP_S:g} s; check the network"


@pytest.fixture
def impatient(monkeypatch):
    """Every command and daemon that is started from here has less patience than in earnest."""

    def choose(say_s: float, give_up_s: float, silence_s: float = 5.0) -> None:
        change_constants(
            monkeypatch,
            {
                "stepfs.store.silence:SAY_AFTER_S": say_s,
                "stepfs.store.silence:GIVE_UP_AFTER_S": give_up_s,
                "stepfs.follow.follower:SILENCE_S": silence_s,
            },
        )

    return choose


@pytest.fixture
def mute(impatient, monkeypatch):
    impatient(SAY_S, GIVE_UP_S)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_a_mount_says_that_it_waits_and_gives_up(mute, tmp_path, monkeypatch, foreground):
    logs = tmp_path / "logs"
    monkeypatch.setenv("STEPFS_LOG_DIR", str(logs))
    directory = tmp_path / "mnt"
    directory.mkdir()
    options = ["--foreground"] if foreground else []
    ended = stepfs("mount", LAKE, directory, "--endpoint-url", mute, *options)
    assert (ended.returncode, ended.stdout) == (6, "")
    waiting, gave_up = ended.stderr.splitlines()
    if foreground:
        assert waiting.endswith(f"WARNING stepfs.mount: {WAITING}")
    else:
        assert waiting == f"stepfs: {WAITING}"
        assert list(logs.iterdir()) == []
    assert gave_up.startswith(GAVE_UP)


def test_the_line_comes_while_the_daemon_waits(mute, tmp_path):
    directory = tmp_path / "mnt"
    directory.mkdir()
    command = [*STEPFS, "mount", LAKE, str(directory), "--endpoint-url", mute]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as starting:
        assert starting.stderr is not None
        assert starting.stderr.readline() == f"stepfs: {WAITING}\n"
        assert starting.poll() is None
        assert starting.stderr.readline().startswith(GAVE_UP)
    assert starting.returncode == 6


@pytest.mark.timeout(200)
def test_a_daemon_that_serves_bears_a_store_that_hangs(seaweed, s3_url, tmp_path, impatient):
    lake_with(s3_url, 1)
    impatient(SAY_S, 60.0, 2.0)
    with (
        road_to(seaweed) as road,
        mounted(s3_url, tmp_path / "m", "--endpoint-url", road.endpoint_url, allowed=[*ALLOWED, WAITS]) as mount,
    ):
        opened = len(mount.log.read_text())
        road.cut("hangs")
        until(lambda: not mount.status()["store"]["reachable"], "status does not say so")
        assert "waiting for" not in mount.log.read_text()[opened:]
        road.mend("hangs")
