"""The watchdog, and the session with the kernel that it watches."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from stepfs.mount.daemon import session, watchdog
from stepfs.mount.daemon.watchdog import Timing, Watchdog
from stepfs.mount.fuse.link import Link
from stepfs.mount.host import mount_table
from stepfs.mount.host.abort import abort_handle
from stepfs.mount.keeper.process import Keeper

QUICK = Timing(interval_s=0.01, stuck_s=0.1, abort_s=0.3)
SLOW_MACHINE_S = 60.0


class Heard:
    """Everything that was notified, and events for what a test waits for."""

    def __init__(self):
        self.messages = []
        self.more = trio.Event()

    def notify(self, state):
        self.messages.append(state)
        self.more.set()
        self.more = trio.Event()


def watched(*, timing=QUICK, answered=lambda: 0, unanswered=lambda: None, status=lambda: "serving", held=lambda: 0):
    heard, gave_up = Heard(), threading.Event()
    dog = Watchdog(
        notify=heard.notify,
        answered=answered,
        unanswered=unanswered,
        held=held,
        status=status,
        on_stuck=gave_up.set,
        timing=timing,
    )
    return dog, heard, gave_up


async def beats(heard, count):
    with trio.fail_after(SLOW_MACHINE_S):
        while heard.messages.count("WATCHDOG=1") < count:
            await heard.more.wait()


async def test_a_healthy_loop_beats_and_says_its_status_only_when_it_changes(nursery):
    lines = iter(["one", "one", "two"])
    dog, heard, gave_up = watched(status=lambda: next(lines, "two"))
    await nursery.start(dog.run)
    await beats(heard, 5)
    assert [m for m in heard.messages if m.startswith("STATUS")] == ["STATUS=one", "STATUS=two"]
    assert not gave_up.is_set()


async def test_a_loop_that_stands_still_is_dumped_and_given_up(nursery, capfd):
    dog, heard, gave_up = watched()
    await nursery.start(dog.run)
    await beats(heard, 2)
    assert gave_up.wait(SLOW_MACHINE_S)  # blocks the loop: that is the fault
    shown, until = "", time.monotonic() + SLOW_MACHINE_S
    while "test_a_loop_that_stands_still" not in shown and time.monotonic() < until:
        shown += capfd.readouterr().err
    assert "test_a_loop_that_stands_still" in shown


async def test_a_standstill_is_given_up_though_nobody_empties_stderr(nursery, monkeypatch):
    """The stacks used to be written with the GIL held: into a full pipe, that stopped the watching thread as well."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with suppress(BlockingIOError):
        while os.write(theirs, bytes(4096)):
            pass
    os.set_blocking(theirs, True)
    dog, heard, gave_up = watched()
    await nursery.start(dog.run)
    await beats(heard, 2)
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert gave_up.wait(SLOW_MACHINE_S)  # blocks the loop: that is the fault
        monkeypatch.undo()
        os.close(ours)  # lets the writing thread go
    await beats(heard, heard.messages.count("WATCHDOG=1") + 1)


@pytest.mark.logs("the mount has not answered")
async def test_a_deaf_mount_is_no_proof_of_life_though_the_loop_turns(nursery):
    waiting = 0
    dog, heard, gave_up = watched(timing=Timing(0.01, 0.1, 0.6), unanswered=lambda: waiting)
    await nursery.start(dog.run)
    await beats(heard, 1)
    waiting = 1
    with trio.fail_after(SLOW_MACHINE_S):
        while not gave_up.is_set():
            before = heard.messages.count("WATCHDOG=1")
            await trio.sleep(0.05)
    assert heard.messages.count("WATCHDOG=1") == before  # systemd had stopped hearing of it before


@pytest.mark.parametrize("proof", ["traffic", "handlers hold it", "the kernel waits for nothing", "nobody knows"])
async def test_a_mount_that_answers_or_holds_what_waits_is_not_deaf(nursery, proof):
    begin = trio.current_time()

    def answered():
        return int((trio.current_time() - begin) / 0.05) if proof == "traffic" else 0

    waits = {"the kernel waits for nothing": 0, "nobody knows": None}.get(proof, 1)
    dog, heard, gave_up = watched(
        answered=answered, unanswered=lambda: waits, held=lambda: int(proof == "handlers hold it"),
        timing=Timing(0.01, 0.2, 0.4),
    )  # fmt: skip
    await nursery.start(dog.run)
    await trio.sleep(1.0)  # longer than deafness is borne with
    await beats(heard, heard.messages.count("WATCHDOG=1") + 2)
    assert not gave_up.is_set()


def test_a_process_that_was_stopped_was_not_stuck(tmp_path):
    code = f"""
import time, trio
from pathlib import Path
from stepfs.mount.daemon.watchdog import Timing, Watchdog
def notify(state): Path({str(tmp_path / "beats")!r}).open("a").write("x")
async def main():
    dog = Watchdog(notify=notify, answered=lambda: 0, unanswered=lambda: None, held=lambda: 0, status=lambda: "",
                   on_stuck=lambda: Path({str(tmp_path / "gave up")!r}).touch(), timing=Timing(0.1, 0.5, 1.0))
    await dog.run()
trio.run(main)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    beats_of = tmp_path / "beats"

    def beaten(count):
        deadline = time.monotonic() + SLOW_MACHINE_S
        while not beats_of.exists() or beats_of.stat().st_size < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    try:
        beaten(3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # twice as long as a stuck loop may take
        process.send_signal(signal.SIGCONT)
        beaten(beats_of.stat().st_size + 5)
        assert not (tmp_path / "gave up").exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Timing()),
        ({"WATCHDOG_USEC": "60000000"}, Timing(10.0, 30.0, 54.0)),
        ({"WATCHDOG_USEC": "6000000", "WATCHDOG_PID": "7"}, Timing(2.0, 3.0, 5.4)),
        ({"WATCHDOG_USEC": "6000000", "WATCHDOG_PID": "8"}, Timing()),  # meant for another process
        ({"WATCHDOG_USEC": "soon"}, Timing()),
        ({"WATCHDOG_USEC": "600000000"}, Timing(10.0, 30.0, 120.0)),
    ],
)
def test_timing_honours_the_supervisor(environment, expected):
    found = Timing().under(environment, 7)
    assert (found.interval_s, found.stuck_s, found.abort_s) == pytest.approx(
        (expected.interval_s, expected.stuck_s, expected.abort_s)
    )


async def test_what_systemd_receives(nursery, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(SLOW_MACHINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        dog, _, _ = watched()
        keeper = SimpleNamespace()  # what a daemon says to its own
        dog.notify = lambda text: Keeper._notify(keeper, text)
        await nursery.start(dog.run)
        received = {(await trio.to_thread.run_sync(systemd.recv, 4096)).decode() for _ in range(5)}
        nursery.cancel_scope.cancel()
    assert received == {"WATCHDOG=1", "STATUS=serving"}


def test_abort_writes_where_the_kernel_listens_and_survives_where_it_does_not(tmp_path):
    (tmp_path / "53").mkdir()
    (tmp_path / "53/abort").write_text("")
    with abort_handle("0:53", tmp_path) as handle:
        (tmp_path / "53/abort").rename(tmp_path / "gone")  # detached; the next mount has the number
        (tmp_path / "53/abort").write_text("")
        assert given_up(handle).returncode == 1
    assert (tmp_path / "gone").read_text() == "1"
    assert (tmp_path / "53/abort").read_text() == ""
    with abort_handle("0:54", tmp_path) as handle:
        assert handle is None
        assert b"connection was aborted" in given_up(handle).stderr


def given_up(handle, before=""):
    script = f"from stepfs.mount.daemon import watchdog\n{before}\nwatchdog.abort_and_exit({handle})"
    descriptors = [] if handle is None else [handle]
    return subprocess.run(
        [sys.executable, "-c", script], pass_fds=descriptors, capture_output=True, timeout=60, check=False
    )


def test_no_thread_left_is_no_reason_to_live_on():
    no_thread = "import threading\ndef start(_): raise RuntimeError\nthreading.Thread.start = start"
    assert given_up(None, no_thread).returncode == 1


async def test_stacks_that_cannot_be_shown_do_not_end_the_watch(nursery, monkeypatch):
    def no_descriptor():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(watchdog, "thread_stacks", no_descriptor)
    dog, heard, gave_up = watched()
    await nursery.start(dog.run)
    await beats(heard, 2)
    assert gave_up.wait(SLOW_MACHINE_S)  # blocks the loop: that is the fault
    await beats(heard, heard.messages.count("WATCHDOG=1") + 1)


def test_the_kernel_says_how_many_requests_it_waits_for(tmp_path):
    (tmp_path / "53").mkdir()
    (tmp_path / "53/waiting").write_text("3\n")
    assert watchdog.unanswered("0:53", tmp_path) == 3
    assert watchdog.unanswered("0:54", tmp_path) is None


def end(text: str = "fuse_session_receive_buf failed with Software caused connection abort") -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, text)


def main_that_raises(monkeypatch, error: Exception) -> None:
    async def main(*, min_tasks: int, max_tasks: int) -> None:
        raise ExceptionGroup("of its nursery", [ExceptionGroup("of a nursery in it", [error])])

    monkeypatch.setattr("pyfuse3.main", main)


async def test_a_request_that_was_being_read_at_unmount_is_no_fault(monkeypatch):
    """The kernel then says ECONNABORTED, not ENODEV: once in 3,293 unmounts of a mount with three busy readers."""
    main_that_raises(monkeypatch, end())
    await Link(-1, -1, b"").answer()


async def test_a_fault_beside_it_is_told_alone(monkeypatch):
    main_that_raises(monkeypatch, ExceptionGroup("two", [end(), ValueError("a fault of a handler")]))
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await Link(-1, -1, b"").answer()


@pytest.mark.parametrize("error", [end("an endpoint went away"), OSError(errno.EBADF, "receive_buf")])
async def test_an_error_of_a_handler_is_a_fault(monkeypatch, error):
    main_that_raises(monkeypatch, error)
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        await Link(-1, -1, b"").answer()


OURS = "90 22 0:53 / /mnt/a ro,nosuid shared:1 - fuse.stepfs s3://b/p ro\n"
OTHERS = "".join(
    f"{number} 22 0:{number} / /mnt/{number} rw shared:{number} - tmpfs 0:53 rw\n" for number in range(100, 5100)
)


class Table:
    """A mount table that changes while somebody polls it; counts how often it is read, and in which threads."""

    def __init__(self, monkeypatch, path):
        self.path = path
        self.reads = []
        self.changes = []  # contents to come, one per poll; None: the poll ends without a change
        monkeypatch.setattr(mount_table, "_MOUNTINFO", self)
        monkeypatch.setattr(select, "poll", lambda: self)

    def open(self, mode, *, buffering=-1):
        assert (mode, buffering) == ("rb", 0)
        self.reads.append(threading.current_thread())
        return self.path.open(mode, buffering=buffering)

    def register(self, file, events):
        assert events & select.POLLPRI

    def poll(self, timeout_ms):
        assert timeout_ms > 0
        content = self.changes.pop(0)
        if content is not None:
            self.path.write_text(content)


@pytest.fixture
def table(tmp_path, monkeypatch):
    made = Table(monkeypatch, tmp_path / "mountinfo")
    made.path.write_text(OTHERS + OURS)
    return made


def test_it_waits_through_changes_of_other_mounts_until_its_own_is_gone(table):
    table.changes = [OURS + OTHERS, None, OURS, OURS.replace("/mnt/a", "/mnt/elsewhere"), OTHERS]
    mount_table.wait_until_detached("0:53")
    assert table.changes == []


@pytest.mark.parametrize("content", ["", OTHERS, OURS.replace("0:53", "0:5"), OURS.replace("0:53", "10:53")])
def test_a_mount_that_is_gone_already_is_not_waited_for(table, content):
    table.path.write_text(content)
    mount_table.wait_until_detached("0:53")


async def test_the_loop_neither_reads_nor_parses_the_table(table, monkeypatch):
    def refuse():
        raise AssertionError("5,000 mounts take 11 ms to parse")

    monkeypatch.setattr(mount_table, "mounts", refuse)
    table.changes = [OURS, OTHERS]
    with trio.CancelScope() as background:
        await session._until_detached(background, "0:53")
        await trio.sleep_forever()
    assert background.cancelled_caught
    assert table.reads
    assert threading.current_thread() not in table.reads
