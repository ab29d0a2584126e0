"""The store goes away for a while, hanging or refusing: what is at hand is read on, who waits goes on by himself."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import faultproxy
import pytest
import servers
from finished import ran
from forked import Forked
from realmount import PATIENCE_S, change_constants, lake_with, mounted, needs_resend, payload, running, stepfs, until

from stepfs_producer import Producer

PROXY = Path(faultproxy.__file__)
READ = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
ALLOWED = ["cannot follow the lake", "the store answers again", "cannot read the record of group"]


class Road:
    """The only way from a mount to the store: a proxy that can be stopped, which hangs, or killed, which refuses."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        (self._port,) = servers.free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        self._start()

    def _start(self) -> None:
        command = [sys.executable, str(PROXY), str(self._upstream_port), "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip().decode() == self.endpoint_url

    def cut(self, how: str) -> None:
        if how == "hangs":
            self._process.send_signal(signal.SIGSTOP)
        else:
            self.close()

    def mend(self, how: str) -> None:
        if how == "hangs":
            self._process.send_signal(signal.SIGCONT)
        else:
            self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def road_to(server: servers.S3Server) -> Iterator[Road]:
    road = Road(int(server.endpoint_url.rpartition(":")[2]))
    try:
        yield road
    finally:
        road.close()


def reader_of(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", READ, str(path)], stdout=subprocess.PIPE, text=True)


def digest(step: int, index: int) -> str:
    return hashlib.sha256(payload(step, index)).hexdigest()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("outage_s", [6, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", ["hangs", pytest.param("refuses", marks=pytest.mark.nightly)])
def test_the_store_is_away_for_a_while(seaweed, s3_url, tmp_path, how, outage_s):
    lake_with(s3_url, 6)
    port = servers.free_port_of_nobody()
    options = [
        "--ranks", "0-1", "--prefetch", "3", "--wait", "300", "--group", "run", "--metrics-port", str(port),
    ]  # fmt: skip
    with (
        road_to(seaweed) as road,
        mounted(s3_url, tmp_path / "m", *options, "--endpoint-url", road.endpoint_url, allowed=ALLOWED) as mount,
    ):
        # A file that is read between its fetch and its priming is never primed.
        until(lambda: mount.status()["data"]["primed_files"] >= 6, "steps 0 to 2 are not primed")
        assert mount.file(0, 0).read_bytes() == payload(0, 0)
        until(lambda: mount.status()["data"]["primed_files"] >= 8, "steps 0 to 3 are not primed")
        fetched = mount.status()["data"]["bytes_fetched"]
        readers = [(6, reader_of(mount.file(6, 1)))]  # not committed yet
        until(lambda: mount.status()["waiting"] == 1, "nobody waits")

        road.cut(how)
        away = time.monotonic()
        until(lambda: not mount.status()["store"]["reachable"], "status does not say so", within_s=9.5)
        assert mount.status()["store"]["trouble"]
        with Producer(s3_url, producer_id="p0") as producer:  # they have another road
            producer.append([payload(6, index) for index in range(2)], position=6)
        readers.append((5, reader_of(mount.file(5, 1))))  # committed, but not at hand
        rounds = 0
        while rounds < 3 or time.monotonic() - away < outage_s:
            began = time.monotonic()
            assert mount.steps() == [f"step-{step:09d}" for step in range(6)]
            assert len(os.listdir(mount.step(5))) == 2
            for step in (0, 1, 2):
                for rank in (0, 1):
                    assert mount.file(step, rank).read_bytes() == payload(step, rank)
            assert time.monotonic() - began < PATIENCE_S  # from the store nothing would come at all
            assert [reader.poll() for _, reader in readers] == [None, None]
            rounds += 1
            time.sleep(0.2)
        assert not mount.status()["store"]["reachable"]
        assert mount.status()["data"]["bytes_fetched"] == fetched
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as scrape:
            assert "\nstepfs_store_up 0.0\n" in scrape.read().decode()

        road.mend(how)
        for step, reader in readers:
            assert reader.communicate(timeout=90)[0].strip() == digest(step, 1)
        until(lambda: mount.status()["store"]["reachable"], "status does not say that it is back")
        assert mount.steps()[-1] == "step-000000006"


def test_an_unmount_names_the_store_that_a_killed_reader_waited_for(seaweed, s3_url, tmp_path):
    """The kernel ends the reader, and not its READ, which keeps the file open."""
    lake_with(s3_url, 6)
    with (
        road_to(seaweed) as road,
        mounted(
            s3_url,
            tmp_path / "m",
            "--prefetch",
            "0",
            "--no-prime",
            "--endpoint-url",
            road.endpoint_url,
            allowed=ALLOWED,
        ) as mount,
    ):
        assert mount.file(0, 0).read_bytes() == payload(0, 0)  # their index is at hand
        road.cut("hangs")
        until(lambda: not mount.status()["store"]["reachable"], "status does not say so", within_s=20)
        with reader_of(mount.file(5, 1)) as reader:
            until(lambda: mount.status()["open_files"] == 1, "nothing is read")
            reader.kill()
        done = stepfs("unmount", mount.directory)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)
        assert "by a read that waits for the store, which does not answer" in done.stderr
        (offered,) = re.findall(r"`([^`]+)`", done.stderr)
        assert ran(shlex.split(offered)).returncode == 0
        until(lambda: not running(mount.pid), "the daemon goes on")


@pytest.mark.nightly
@needs_resend
@pytest.mark.usefixtures("real_daemons")
@pytest.mark.parametrize("how", [pytest.param("hangs", marks=pytest.mark.nightly), "refuses"])
def test_a_daemon_that_is_killed_while_the_store_is_away_is_followed_once_it_is_back(
    seaweed, s3_url, tmp_path, monkeypatch, how
):
    lake_with(s3_url, 2)
    patience = {
        "stepfs.mount.launch:PATIENCE_S": 20.0,  # less than two daemons wait for a store that hangs
        "stepfs.store.silence:SAY_AFTER_S": 1.0,
        "stepfs.store.silence:GIVE_UP_AFTER_S": 12.0,
    }
    change_constants(monkeypatch, patience)
    allowed = [*ALLOWED, WAITS, "cannot read", "no answer for"]
    with (
        road_to(seaweed) as road,
        mounted(s3_url, tmp_path / "m", "--no-prime", "--endpoint-url", road.endpoint_url, allowed=allowed) as mount,
    ):
        road.cut(how)
        before, said = mount.pid, len(mount.log.read_text())
        mount.kill(signal.SIGKILL)
        reader = reader_of(mount.file(1, 1))
        until(lambda: mount.log.read_text()[said:].count(" ERROR ") == 2, "nobody tries twice to follow")
        assert reader.poll() is None
        road.mend(how)
        assert reader.communicate(timeout=PATIENCE_S)[0].strip() == digest(1, 1)
        mount.pid = mount.config()["pid"]
        assert mount.config()["follows"] == before


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


def test_a_mount_in_the_foreground_says_that_it_waits_and_gives_up(mute, tmp_path):
    (tmp_path / "mnt").mkdir()
    ended = stepfs("mount", LAKE, tmp_path / "mnt", "--endpoint-url", mute, "--foreground")
    assert (ended.returncode, ended.stdout) == (6, "")
    waiting, gave_up = ended.stderr.splitlines()
    assert waiting.endswith(f"WARNING stepfs.mount: {WAITING}")
    assert gave_up.startswith(GAVE_UP)


def test_the_line_comes_while_the_daemon_waits(mute, tmp_path, monkeypatch):
    logs = tmp_path / "logs"
    monkeypatch.setenv("STEPFS_LOG_DIR", str(logs))
    (tmp_path / "mnt").mkdir()
    with Forked("stepfs", "mount", LAKE, tmp_path / "mnt", "--endpoint-url", mute) as starting:
        assert starting.stderr.readline() == f"stepfs: {WAITING}\n"
        assert starting.poll() is None
        assert starting.stderr.readline().startswith(GAVE_UP)
        assert (starting.wait(), starting.communicate()) == (6, ("", ""))
    assert list(logs.iterdir()) == []


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
