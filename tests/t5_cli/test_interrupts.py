"""Ctrl-C ends every command wherever it stands: at each of its requests, and where nothing can be cancelled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from lakes import commit, produce, stepfs
from planned_lake import made
from test_cli_patience import LAKE, mute
from test_produce_run import plan_in

from stepfs.store.local.local_store import LocalStore
from stepfs_producer.run import session

__all__ = ["mute"]  # fixtures

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def lake(file_url: str) -> str:
    assert stepfs("init", file_url, "--slices", 3, "--ext", ".bin").code == 0
    commit(file_url, range(3))
    assert stepfs("checkpoint", file_url, "--group", "g", "--new-group", 1).code == 0
    return file_url


class Hand:
    """Presses Ctrl-C at the request with a number, which is never answered then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.requests = 0
        self.number = signal.SIGINT
        answer = LocalStore._run

        async def run(store: LocalStore, work: Callable, *arguments: object) -> object:
            if self.requests == self.at:
                self.at = None
                signal.raise_signal(self.number)
                await trio.sleep_forever()
            self.requests += 1
            return await answer(store, work, *arguments)

        monkeypatch.setattr(LocalStore, "_run", run)

    def before(self, request: int, number: int = signal.SIGINT) -> None:
        self.at, self.requests, self.number = request, 0, number


@pytest.mark.parametrize(
    "command", [
        ("ls", "{}"), ("status", "{}"), ("show", "{}", "--step", 0), ("checkpoint", "{}", "--group", "g", 2),
        ("reclaim", "{}"), ("verify", "{}"), ("retire-producer", "{}", "tok-0"), ("fork", "{}@2", "{}-fork"),
        ("seal", "{}"), ("init", "{}-new", "--slices", 1), ("doctor", "{}"),
    ], ids=lambda command: command[0],
)  # fmt: skip
@pytest.mark.logs("an earlier fork to here")  # which an interrupted one leaves behind
def test_each_request_of_a_command_can_be_interrupted(lake, monkeypatch, command):
    words = [str(word).format(lake) for word in command]
    hand = Hand(monkeypatch)
    for request in range(100):
        hand.before(request)
        ended = stepfs(*words)
        if hand.at is not None:
            assert request > 1, "it needs some"
            return
        assert (ended.code, ended.err) == (130, ""), request
    pytest.fail("the command does not end")


class NoEngine:
    """Workers that no run of these tests comes to need."""

    workers = spares = idle = 1
    died = kept_bytes = 0

    async def admit(self, look: object) -> None:
        await trio.lowlevel.checkpoint()


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[tuple[NoEngine, int]]:
        yield NoEngine(), 1

    monkeypatch.setattr(session, "open_engine", opened)


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize("number", SIGNALS)
def test_each_stage_of_the_start_of_a_run_can_be_interrupted(file_url, tmp_path, monkeypatch, number):
    """And none goes on to open the producer, which would fence a healthy run."""
    plan = plan_in(tmp_path)
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy").code == 0
    hand = Hand(monkeypatch)
    epochs = []
    for request in range(100):
        hand.before(request, number)
        ended = produce("run", plan, file_url, "--limit-steps", 1)
        assert (ended.code, ended.out, ended.err) == (128 + number, "", ""), request
        hand.before(-1)
        epochs.append(epoch := epoch_of(file_url))
        if epoch:
            break  # this request came after the epoch's
    assert epochs[-1] == 1
    assert len(epochs) > 5


def epoch_of(lake: str) -> int:
    producers = stepfs("status", lake, "--json").document["producers"]
    return producers["plan"]["epoch"] if producers else 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_stage_without_a_store_opens_no_producer(file_url, tmp_path, monkeypatch, number):
    """The workers start: there is nothing to commit, and nobody is fenced."""

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[tuple[NoEngine, int]]:
        signal.raise_signal(number)
        yield NoEngine(), 1

    monkeypatch.setattr(session, "open_engine", opened)
    plan = plan_in(tmp_path)
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy").code == 0
    ended = produce("run", plan, file_url)
    assert (ended.code, ended.out, ended.err) == (128 + number, "", "")
    assert epoch_of(file_url) == 0


def ended_by(process: subprocess.Popen[str], number: int) -> int:
    """It has 2 s, and this machine other work."""
    process.send_signal(number)
    try:
        return process.wait(20)
    finally:
        process.kill()


RECORD = ("--source", "prose", "--file", "prose.txt", "--record", "0")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The directory of a plan that made two steps of a lake."""
    directory = tmp_path_factory.mktemp("planned")
    made(directory, steps=2)
    return directory


# What cannot be cancelled: a thread in a file system, or in a server's library, that does not answer.
STUCK = """
import os, sys, time
from {module} import {owner}
def stuck(*_, **__):
    os.write(2, b"stands" + bytes([10]))
    time.sleep(3600)
{owner}.{name} = stuck
from {package}.cli import main
sys.argv = {argv!r}
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("package", "where", "command"),
    [
        ("stepfs", ("stepfs.store.local.local_store", "LocalStore", "_get"), ["ls", "LAKE"]),
        ("stepfs_producer", ("stepfs.store.local.local_store", "LocalStore", "_get"), ["run", "PLAN", "LAKE"]),
        ("stepfs_producer", ("stepfs_producer.sources", "listing", "_found"), ["run", "PLAN", "LAKE"]),
        ("stepfs_producer", ("stepfs_producer.sources", "listing", "_found"), ["check", "PLAN"]),
        ("stepfs_producer", ("stepfs_producer.sources", "listing", "_found"), ["simulate", "PLAN", "--steps", "5"]),
        ("stepfs_producer", ("stepfs_producer.sources", "listing", "_found"), ["replay", "PLANNED", "--steps", "0:2"]),
        ("stepfs_producer", ("stepfs_producer.run.history", "find", "require_files"), ["find", "PLANNED", *RECORD]),
        ("stepfs_producer", ("stepfs_producer.run.history", "find", "read_block"), ["find", "PLANNED", *RECORD]),
        (
            "stepfs_producer",
            ("stepfs_producer.run.history.texts", "_Source", "text"),
            ["lineage", "PLANNED", "--step", "0", "--text"],
        ),
    ],
)
def test_what_cannot_be_cancelled_is_left_behind(
    file_url, planned, tmp_path, monkeypatch, package, where, command, number
):
    monkeypatch.chdir(planned)
    names = {"LAKE": file_url, "PLAN": str(plan_in(tmp_path)), "PLANNED": f"file://{planned}/lake"}
    module, owner, name = where
    argv = ["command", *(names.get(word, word) for word in command)]
    code = STUCK.format(package=package, module=module, owner=owner, name=name, argv=argv)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "stands\n"
        assert ended_by(process, number) in {128 + number, -number}
        assert process.stderr.read().replace("stands\n", "") == ""


def test_a_silent_server_keeps_no_run(mute, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", mute)
    argv = ["stepfs-produce", "run", str(plan_in(tmp_path)), LAKE, "--workers", "1"]
    code = f"import sys; sys.argv = {argv!r}; from stepfs.store import silence; silence.SAY_AFTER_S = 0.2\n"
    code += "from stepfs_producer.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        assert "no answer yet" in process.stderr.readline()
        assert ended_by(process, signal.SIGINT) == 130
        assert process.stderr.read() == ""
