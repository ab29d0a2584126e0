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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import servers
import trio
from faultproxy import FaultProxy
from finished import ran
from forked import Forked, stand_still
from lakes import commit, produce, stepfs
from planned_lake import made
from plans import plan_in
from realmount import change_constants

from stepfs._internal import control_files
from stepfs.store import silence
from stepfs.store.local.local_store import LocalStore
from stepfs_producer.run import session

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
        ("fork", LAKE, "s3://stepfs-tests/new"), ("verify", LAKE),
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
        ("stepfs", "stepfs.cli.commands.ls", ["stepfs", "ls", "file:///nothing"]),
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
    words = ["reclaim", "s3://bucket/run", "--endpoint-url", endpoint, "--every", "0.1"]
    with Forked("stepfs", *words, env=environment) as process:
        for _ in range(2):
            assert "trying again in 0.1 s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


BEAR_S = 2.0
# The command with less patience than in earnest.
PRODUCE = f"""
from stepfs.store import silence
from stepfs.store.s3.s3_store import S3Store
from stepfs_producer.commit import producer
S3Store.__init__.__kwdefaults__["commit_timeout_s"] = 1.0
silence.SAY_AFTER_S, producer.GIVE_UP_AFTER_S = 0.5, {BEAR_S}
from stepfs_producer.cli import main
main()
"""


def test_text_says_that_it_waits_from_the_start(mute: str, corpus: Path, monkeypatch) -> None:
    monkeypatch.setattr(silence, "GIVE_UP_AFTER_S", 1.0)
    began_s = time.monotonic()
    done = produce("text", LAKE, "--endpoint-url", mute, "--slices", 1, "--ext", ".bin", "-i", corpus)
    assert time.monotonic() - began_s < 60  # four time-outs of 20 s without it
    waiting, gave_up = done.stderr.splitlines()
    assert waiting == f"stepfs-produce: waiting for {LAKE}: no answer yet; gives up after 1 s"
    assert gave_up.startswith(f"stepfs-produce: {LAKE}: no answer for 1 s; check the network")
    assert (done.returncode, done.stdout) == (6, "")


@pytest.mark.nightly
async def test_a_run_bears_silence_in_the_middle(
    s3_url: str, fault_proxy: FaultProxy, corpus: Path, tmp_path: Path
) -> None:
    """It bears longer than at its start, says so as soon, and ends then, whatever it was doing."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"output: {{mesh: dp=1, sequence_length: 8, ext: .npy}}\nsources: {{a: {{format: text, files: {corpus}}}}}\n"
    )
    words = ["run", plan, s3_url, "--endpoint-url", fault_proxy.endpoint_url, "--steps-per-second", 20]
    words = [sys.executable, "-c", PRODUCE, *map(str, words), "--workers", "1"]
    ended: list[subprocess.CompletedProcess[bytes]] = []

    async def produced() -> None:
        ended.append(await trio.run_process(words, capture_stdout=True, capture_stderr=True, check=False))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produced)
            while sum("/data/" in request.path for request in fault_proxy.handled) < 5:  # noqa: ASYNC110 -- another process
                await trio.sleep(0.02)
            fault_proxy.hold()
            began_s = trio.current_time()
    assert trio.current_time() - began_s < BEAR_S + 10
    *said, gave_up = ended[0].stderr.decode().splitlines()
    waiting = f"stepfs-produce: waiting for {s3_url}: no answer yet; gives up after {BEAR_S:g} s"
    assert said.count(waiting) == 1  # a commit that was under way may say of its own that it is not decided
    assert gave_up.startswith(f"stepfs-produce: {s3_url}: no answer for {BEAR_S:g} s; check the network")
    assert (ended[0].returncode, ended[0].stdout) == (6, b"")


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

        async def run(store: LocalStore, work: Callable, *arguments: object, **options: bool) -> object:
            if self.requests == self.at:
                self.at = None
                signal.raise_signal(self.number)
                await trio.sleep_forever()
            self.requests += 1
            return await answer(store, work, *arguments, **options)

        monkeypatch.setattr(LocalStore, "_run", run)

    def before(self, request: int, number: int = signal.SIGINT) -> None:
        self.at, self.requests, self.number = request, 0, number


@pytest.mark.parametrize(
    "command", [
        ("ls", "{}"), ("status", "{}"), ("show", "{}", "--step", 0), ("checkpoint", "{}", "--group", "g", 2),
        ("reclaim", "{}"), ("verify", "{}"), ("retire-producer", "{}", "tok-0"), ("retire-group", "{}", "g"), ("fork", "{}", "{}-fork"),
        ("seal", "{}"), ("init", "{}-new", "--slices", 1), ("doctor", "{}"),
    ], ids=lambda command: command[0],
)  # fmt: skip
@pytest.mark.logs("an earlier fork to here")  # which an interrupted one leaves behind
def test_each_request_of_a_command_can_be_interrupted(lake, monkeypatch, command):
    words = [str(word).format(lake) for word in command]
    hand = Hand(monkeypatch)
    for request in (*range(6), *range(6, 100, 3)):  # of many, every third
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
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_each_stage_of_the_start_of_a_run_can_be_interrupted(file_url, tmp_path, monkeypatch, number):
    """And none goes on to open the producer, which would fence a healthy run."""
    plan = plan_in(tmp_path)
    assert stepfs("init", file_url, "--slices", 2, "--ext", ".npy").code == 0
    hand = Hand(monkeypatch)
    epochs = []
    for request in range(0, 100, 1 if number == signal.SIGINT else 3):
        hand.before(request, number)
        ended = produce("run", plan, file_url, "--limit-steps", 1)
        assert (ended.code, ended.out, ended.err) == (128 + number, "", ""), request
        hand.before(-1)
        epochs.append(epoch := epoch_of(file_url))
        if epoch:
            break  # this request came after the epoch's
    assert epochs[-1] == 1
    assert len(epochs) > (5 if number == signal.SIGINT else 1)


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


def ended_by(process: Forked, number: int) -> int:
    """It has 2 s, and this machine other work."""
    process.send_signal(number)
    return process.wait(20)


RECORD = ("--source", "prose", "--file", "prose.txt", "--record", "0")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The directory of a plan that made two steps of a lake."""
    directory = tmp_path_factory.mktemp("planned")
    made(directory, steps=2)
    return directory


LISTING, FINDING = ("stepfs_producer.sources.listing", "", "_found"), "stepfs_producer.run.history.find"


LEFT_BEHIND = [
    (("stepfs.store.local.local_store", "LocalStore", "_get"), ["ls", "LAKE"], signal.SIGINT),
    (LISTING, ["run", "PLAN", "LAKE"], signal.SIGTERM),
    ((FINDING, "", "read_block"), ["find", "PLANNED", *RECORD], signal.SIGTERM),
]
AT_NIGHT = [
    (("stepfs.store.local.local_store", "LocalStore", "_get"), ["ls", "LAKE"], signal.SIGTERM),
    (("stepfs.store.local.local_store", "LocalStore", "_get"), ["run", "PLAN", "LAKE"], signal.SIGINT),
    (LISTING, ["check", "PLAN"], signal.SIGINT), (LISTING, ["simulate", "PLAN", "--limit-steps", "5"], signal.SIGINT),
    (LISTING, ["replay", "PLANNED", "--steps", "0:2"], signal.SIGTERM),
    ((FINDING, "", "require_files"), ["find", "PLANNED", *RECORD], signal.SIGINT),
    (("stepfs_producer.run.history.texts", "_Source", "text"), ["lineage", "PLANNED", "--step", "0", "--text"], signal.SIGINT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("where", "command", "number"), [*LEFT_BEHIND, *(pytest.param(*one, marks=pytest.mark.nightly) for one in AT_NIGHT)]
)
def test_what_cannot_be_cancelled_is_left_behind(file_url, planned, tmp_path, where, command, number):
    names = {"LAKE": file_url, "PLAN": str(plan_in(tmp_path)), "PLANNED": f"file://{planned}/lake"}
    words = [names.get(word, word) for word in command]
    package = "stepfs" if command[0] == "ls" else "stepfs_producer"
    with Forked(package, *words, cwd=planned, first=partial(stand_still, *where)) as process:
        assert process.stderr.readline() == "stands\n"
        assert ended_by(process, number) in {128 + number, -number}
        assert process.stderr.read().replace("stands\n", "") == ""


def test_a_silent_server_keeps_no_run(mute, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", mute)
    change_constants(monkeypatch, {"stepfs.store.silence:SAY_AFTER_S": 0.2})
    with Forked("stepfs_producer", "run", plan_in(tmp_path), LAKE, "--workers", 1) as process:
        assert "no answer yet" in process.stderr.readline()
        assert ended_by(process, signal.SIGINT) == 130
        assert process.stderr.read() == ""
