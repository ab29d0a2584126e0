"""`stepfs mount` of a store that accepts connections and says nothing: a line soon, exit 6 in bounded time; then no bound."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from realmount import STEPFS, make_lake, mounted, produce, until
from test_outage import ALLOWED, road_to

SAY_S, GIVE_UP_S = 0.3, 2.0
WAITS = "no answer yet"  # what a slow opening says, too
LAKE = "s3://stepfs-tests/lake"
WAITING = f"waiting for {LAKE}: no answer yet; gives up after {GIVE_UP_S:g} s"
GAVE_UP = f"stepfs: {LAKE}: no answer for {GIVE_UP_S:g} s; check the network"


@pytest.fixture
def impatient(tmp_path, monkeypatch):
    """Every process that is started from here has less patience than in earnest."""
    directory = tmp_path / "patience"
    directory.mkdir()
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{directory}:{before}" if before else str(directory))

    def choose(say_s: float, give_up_s: float) -> None:
        (directory / "sitecustomize.py").write_text(
            "from stepfs.store import silence\n"
            f"silence.SAY_AFTER_S, silence.GIVE_UP_AFTER_S = {say_s}, {give_up_s}\n"
        )

    return choose


@pytest.fixture
def mute(impatient, monkeypatch):
    impatient(SAY_S, GIVE_UP_S)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def command(directory: Path, endpoint_url: str, *options: str) -> list[str]:
    return [*STEPFS, "mount", LAKE, str(directory), "--endpoint-url", endpoint_url, *options]


@pytest.mark.parametrize("foreground", [False, True], ids=["background", "foreground"])
def test_a_mount_says_that_it_waits_and_gives_up(mute, tmp_path, monkeypatch, foreground):
    logs = tmp_path / "logs"
    monkeypatch.setenv("STEPFS_LOG_DIR", str(logs))
    directory = tmp_path / "mnt"
    directory.mkdir()
    options = ["--foreground"] if foreground else []
    ended = subprocess.run(
        command(directory, mute, *options), capture_output=True, text=True, timeout=60, check=False
    )
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
    with subprocess.Popen(command(directory, mute), stderr=subprocess.PIPE, text=True) as starting:
        assert starting.stderr is not None
        assert starting.stderr.readline() == f"stepfs: {WAITING}\n"
        assert starting.poll() is None
        assert starting.stderr.readline().startswith(GAVE_UP)
    assert starting.returncode == 6


@pytest.mark.timeout(200)
def test_a_daemon_that_serves_bears_a_store_that_hangs(seaweed, s3_url, tmp_path, impatient):
    make_lake(s3_url)
    produce(s3_url, 1)
    impatient(SAY_S, 60.0)
    with (
        road_to(seaweed) as road,
        mounted(
            s3_url, tmp_path / "m", "--endpoint-url", road.endpoint_url, allowed=[*ALLOWED, WAITS]
        ) as mount,
    ):
        opened = len(mount.log.read_text())
        road.cut("hangs")
        until(lambda: not mount.status()["store"]["reachable"], 60, "status does not say so")
        assert "waiting for" not in mount.log.read_text()[opened:]
        road.mend("hangs")
