"""Commands beside a store that is silent or away, and Ctrl-C before they run: a line soon, and an end in bounded
time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import servers
from finished import ran
from lakes import stepfs

from stepfs import control_files
from stepfs.store import silence

SAY_S, GIVE_UP_S = 0.2, 0.6
LAKE = "s3://stepfs-tests/lake"


@pytest.fixture
def mute(monkeypatch):
    """The URL of a server that is stopped; commands have less patience than in earnest."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(silence, "SAY_AFTER_S", SAY_S)
    monkeypatch.setattr(silence, "GIVE_UP_AFTER_S", GIVE_UP_S)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    "command", [
        ("init", LAKE, "--slices", "1"), ("ls", LAKE), ("status", LAKE),
        ("checkpoint", LAKE, "--group", "g", "1"), ("reclaim", LAKE), ("seal", LAKE),
        ("fork", f"{LAKE}@1", "s3://stepfs-tests/new"), ("verify", LAKE),
    ], ids=lambda command: command[0],
)  # fmt: skip
def test_a_command_says_that_it_waits_and_gives_up(mute, command):
    started_s = time.monotonic()
    ended = stepfs(*command, "--endpoint-url", mute)
    assert time.monotonic() - started_s < 100  # sixteen time-outs of 20 s without it
    waiting, gave_up = ended.err.splitlines()
    assert waiting == f"stepfs: waiting for {LAKE}: no answer yet; gives up after {GIVE_UP_S:g} s"
    assert gave_up.startswith(f"stepfs: {LAKE}: no answer for {GIVE_UP_S:g} s; check the network")
    assert (ended.code, ended.out) == (6, "")


def test_doctor_finds_it(mute):
    ended = stepfs("doctor", LAKE, "--endpoint-url", mute)
    assert ended.code == 6
    assert f"waiting for {LAKE}" in ended.err
    assert "no answer for 0.6 s" in ended.out


def test_status_of_a_mount_that_does_not_answer(tmp_path, monkeypatch):
    """The read that hangs stays behind in its thread; here it is a pipe that nobody writes."""
    monkeypatch.setattr(control_files, "ANSWER_S", 0.1)
    (tmp_path / ".stepfs").mkdir()
    status = tmp_path / ".stepfs" / "status.json"
    os.mkfifo(status)
    ended = stepfs("status", tmp_path)
    assert ended.code == 1
    assert "does not answer within 0.1 s" in ended.err
    os.close(os.open(status, os.O_WRONLY))  # lets the thread go


def test_reclaim_without_a_pause_is_refused(file_url):
    for pause in ("0", "0s", "1ms"):
        ended = stepfs("reclaim", file_url, "--every", pause)
        assert (ended.code, ended.err.count("\n")) == (2, 1)


# SIGINT comes at the import of a module, as from a hurried hand.
INTERRUPTED = """
import signal, sys
class Hand:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Hand())
signal.signal(signal.SIGINT, {handler})
from {package}.cli import main
sys.argv = {argv!r}
main()
"""


def interrupted(package, module, argv, *, handler="signal.default_int_handler"):
    code = INTERRUPTED.format(package=package, module=module, argv=argv, handler=handler)
    return ran([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("package", "module", "argv"),
    [
        ("stepfs", "typer", ["stepfs", "--help"]),
        ("stepfs", "stepfs.cli.failure", ["stepfs", "ls", "file:///nothing"]),
        ("stepfs", "stepfs.cli.commands.ls", ["stepfs", "ls", "file:///nothing"]),
        ("stepfs_producer", "typer", ["stepfs-produce", "--help"]),
        ("stepfs_producer", "stepfs_producer.cli.app", ["stepfs-produce", "--help"]),
    ],
)
def test_an_interrupt_while_loading_prints_nothing(package, module, argv):
    done = interrupted(package, module, argv)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_once_the_command_runs_it_is_exit_130():
    done = interrupted("stepfs", "stepfs.lake.log.reader", ["stepfs", "ls", "file:///nothing"])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_that_is_ignored_stays_ignored():
    done = interrupted("stepfs", "typer", ["stepfs", "--version"], handler="signal.SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stepfs ")


def test_it_starts_while_the_store_is_away_and_stops_when_told():
    endpoint = f"http://127.0.0.1:{servers.free_port_of_nobody()}"
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    with subprocess.Popen(
        [
            *(sys.executable, "-c", "from stepfs.cli import main; main()"),
            *("reclaim", "s3://bucket/run", "--endpoint-url", endpoint, "--every", "0.1"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr is not None
        for _ in range(2):
            assert "trying again in 0.1 s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130
