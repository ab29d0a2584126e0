"""A real mount that is blocked on purpose, or suspended: stacks in the log, readers that fail instead of hanging."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from finished import ran
from realmount import PATIENCE_S, clear, gone, mounted, needs_resend, payload, stepfs, until
from succession import tampered

from stepfs_producer import Producer

ABORT_S, WAIT_S = 3.0, 4.0
SERVE = f"""
import ctypes, signal, sys, time
from pathlib import Path
import trio
from stepfs.mount.daemon import watchdog
from stepfs.mount.options import MountOptions
from stepfs.mount.daemon.session import run, serve

lake, directory, cache, ready, seconds, how, recover = sys.argv[1:]
watchdog.TIMING = watchdog.Timing(0.1, 0.5, {ABORT_S})
watchdog.SILENCE_S_MAX = 0.5
options = MountOptions(lake, Path(directory), cache_dir=Path(cache), prime=False, wait_s={WAIT_S}, recover=recover == "True")

def block_on_purpose():
    if how == "with the GIL":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # the mount's own timer would end the sleep
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
    else:
        ends = time.monotonic() + float(seconds)
        while time.monotonic() < ends:
            time.sleep(0.1)

async def block():
    with trio.open_signal_receiver(signal.SIGUSR2) as asked:
        async for _ in asked:
            block_on_purpose()

async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(block)
        await serve(options, Path(ready).touch)
        nursery.cancel_scope.cancel()

if how == "not at all":
    run(options, Path(ready).touch)
else:
    trio.run(main)
"""


class Serving:
    def __init__(self, url, tmp_path, seconds, how, recover=False):
        self.directory, self.log = tmp_path / "m", tmp_path / "log"
        self.directory.mkdir()
        arguments = [url, self.directory, tmp_path / "cache", tmp_path / "ready", seconds, how, recover]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", SERVE, *map(str, arguments)], stdout=log, stderr=log)
        # Not just until it answers: its watchdog starts after that.
        until((tmp_path / "ready").exists, "not ready")

    def said(self, text):
        return text in self.log.read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        clear(self.directory, None)


def blocks(process, number):
    [mask] = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_stuck_loop_is_shown_and_its_readers_fail_instead_of_hanging(lake, tmp_path):
    with Serving(lake, tmp_path, 600, "without the GIL") as serving:
        serving.process.send_signal(signal.SIGUSR2)
        until(lambda: serving.said("block_on_purpose"), "no stacks")
        assert serving.process.poll() is None
        reader = subprocess.Popen(
            [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", str(serving.directory)],
            stderr=subprocess.PIPE,
            text=True,
        )
        _, said = reader.communicate(timeout=PATIENCE_S)
        assert reader.returncode == 1
        assert "Error: [Errno " in said  # ENOTCONN or ECONNABORTED, whichever the kernel had it in
        assert serving.process.wait(timeout=PATIENCE_S) == 1
        assert serving.said("its connection was aborted")
        with mounted(lake, serving.directory) as again:  # what a supervisor's restart does
            assert again.file(0, 0).read_bytes() == payload(0, 0)


STUCK = f"""
import sys
if "stepfs.mount.daemon" in sys.orig_argv and once({{times}}):
    import signal, time
    from stepfs.mount.daemon import watchdog
    watchdog.TIMING = watchdog.Timing(0.1, 0.5, {ABORT_S})
    def block_on_purpose(*_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        while True:
            time.sleep(0.1)
    signal.signal(signal.SIGUSR2, block_on_purpose)
"""


@needs_resend
@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_stuck_daemon_is_followed_by_one_that_serves_and_that_one_by_nobody(lake, tmp_path, monkeypatch, again):
    """It may be the requests that do it."""
    with (
        tampered(monkeypatch, tmp_path, STUCK.format(times=1 + again)),
        mounted(lake, tmp_path / "m", "--no-prime", allowed=["is stuck", "has not answered"]) as mount,
    ):
        mount.kill(signal.SIGUSR2)
        assert max(os.listdir(mount.directory)) == "step-000000002"
        assert "the daemon is stuck; the next one serves" in mount.log.read_text()
        assert mount.status()["follows"] == mount.pid
        assert mount.status()["recoveries"] == 1
        until(lambda: f"after pid {mount.pid} that died" in mount.log.read_text(), "it does not get ready")
        mount.pid = mount.config()["pid"]
        if again:
            mount.kill(signal.SIGUSR2)
            with pytest.raises(OSError, match=r"not connected|abort"):
                os.listdir(mount.directory)
            gone(mount.keeper)
            assert "the daemon is stuck, and so was the one before" in mount.log.read_text()
    clear(mount.directory, None)


def test_a_loop_that_comes_back_was_shown_and_serves_on(lake, tmp_path):
    with Serving(lake, tmp_path, 1.5, "without the GIL") as serving:
        serving.process.send_signal(signal.SIGUSR2)
        until(lambda: serving.said("block_on_purpose"), "no stacks")
        file = serving.directory / "step-000000001/rank-00001.bin"
        assert file.read_bytes() == payload(1, 1)
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(timeout=PATIENCE_S) == 0


def test_a_loop_that_keeps_the_gil_shows_where_when_it_is_asked(lake, tmp_path):
    with Serving(lake, tmp_path, 600, "with the GIL") as serving:
        serving.process.send_signal(signal.SIGUSR2)
        until(lambda: blocks(serving.process, signal.SIGALRM), "does not block")

        def shown():
            """Another thread shows itself if the main one has a signal to handle already."""
            serving.process.send_signal(signal.SIGUSR1)  # ends the sleep, after its handler
            return serving.said("block_on_purpose")

        until(shown, "no stack")
        file = serving.directory / "step-000000001/rank-00001.bin"
        assert file.read_bytes() == payload(1, 1)


def test_an_idle_mount_keeps_proving_that_it_answers(lake, tmp_path):
    """What systemd would hear of a mount that nobody reads, and no stack in its log."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE_S)
        os.environ["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        os.environ["WATCHDOG_USEC"] = "6000000"
        try:
            with mounted(lake, tmp_path / "m") as mount:
                heard = []
                while "READY=1" not in heard or heard.count("WATCHDOG=1") < 3:
                    heard.append(systemd.recv(4096).decode())
                assert any(line.startswith("STATUS=serving") and "steps 0 to 2" in line for line in heard)
                mount.kill(signal.SIGUSR1)
                until(lambda: "Thread 0x" in mount.log.read_text(), "SIGUSR1 shows no stacks")
                assert "Timeout (" not in mount.log.read_text()
                stepfs("unmount", mount.directory).check_returncode()
                while "STOPPING=1" not in heard:
                    heard.append(systemd.recv(4096).decode())
        finally:
            del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]


def test_a_daemon_that_is_suspended_again_and_again_serves_on(lake, tmp_path):
    """Each time for longer than a loop may stand still; stacks that were walked as it went on ended it (SIGSEGV)."""
    with Serving(lake, tmp_path, 0, "not at all") as serving:
        for _ in range(8):
            serving.process.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            serving.process.send_signal(signal.SIGCONT)
            os.stat(serving.directory / ".stepfs/status.json")
        assert serving.process.poll() is None
        assert not serving.said("Thread 0x")


def test_a_reader_that_waits_is_not_given_up_because_the_daemon_was_suspended(lake, tmp_path):
    with Serving(lake, tmp_path, 0, "not at all") as serving:
        awaited = serving.directory / "step-000000003/rank-00001.bin"
        status = serving.directory / ".stepfs/status.json"
        reader = subprocess.Popen(["cat", str(awaited)], stdout=subprocess.PIPE)
        until(lambda: json.loads(status.read_text())["waiting"] == 1, "nobody waits")
        serving.process.send_signal(signal.SIGSTOP)
        with Producer(lake, producer_id="p0") as producer:
            producer.append([payload(3, index) for index in range(2)], position=3)
        time.sleep(WAIT_S + 0.2)
        serving.process.send_signal(signal.SIGCONT)
        assert reader.communicate(timeout=PATIENCE_S)[0] == payload(3, 1)


def test_a_stopped_daemon_does_not_keep_its_mount_point(lake, tmp_path):
    """What is advised for a mount that does not answer: detach it, and mount again."""
    with Serving(lake, tmp_path, 0, "not at all") as serving:
        serving.process.send_signal(signal.SIGSTOP)
        subprocess.run(["umount", "-l", str(serving.directory)], check=True)
        with mounted(lake, serving.directory) as mount:
            assert mount.file(0, 0).read_bytes() == payload(0, 0)
            serving.process.send_signal(signal.SIGCONT)
            serving.process.wait(PATIENCE_S)
            assert mount.file(1, 1).read_bytes() == payload(1, 1)


@pytest.mark.nightly
def test_a_stuck_daemon_that_was_detached_aborts_no_other_mount(lake, tmp_path):
    """The kernel gives the next mount the number that is free again. In a namespace where connections can be aborted."""
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}; from pathlib import Path; import test_stuck\n"
        f"test_stuck.detached_while_stuck({lake!r}, Path({str(tmp_path)!r}))"
    )
    with_fusectl = 'mount -t fusectl none /sys/fs/fuse/connections && exec "$@"'
    done = ran(["unshare", "-m", "sh", "-c", with_fusectl, "sh", sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr


def detached_while_stuck(lake, tmp_path):
    with Serving(lake, tmp_path, 600, "without the GIL") as serving:
        serving.process.send_signal(signal.SIGUSR2)
        until(lambda: serving.said("block_on_purpose"), "no stacks")
        subprocess.run(["umount", "-l", str(serving.directory)], check=True)
        with mounted(lake, serving.directory) as mount:
            serving.process.wait(PATIENCE_S)
            assert serving.said("connection was aborted")
            assert mount.file(0, 0).read_bytes() == payload(0, 0)
            assert mount.file(1, 1).read_bytes() == payload(1, 1)
