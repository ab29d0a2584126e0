"""Why readers of a real mount waited: a daemon that was stopped or killed, commits that do not come; and where that stands."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

from realmount import mounted, needs_resend, stepfs, until
from succession import kill

from stepfs_producer import Producer


class Opening:
    """A reader that opens one file again and again, and the longest that it took."""

    def __init__(self, path):
        self.path, self.longest_s, self.began_s, self.ended = path, 0.0, 0.0, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while not self.ended.is_set():
            self.began_s = time.monotonic()
            os.close(os.open(self.path, os.O_RDONLY))
            self.longest_s = max(self.longest_s, time.monotonic() - self.began_s)
            self.ended.wait(0.02)


@contextmanager
def opening(path):
    reader = Opening(path)
    reader.thread.start()
    try:
        yield reader
    finally:
        reader.ended.set()
        reader.thread.join()


def waits(mount, what="seconds"):
    return mount.status()["waits"][what]


def test_a_daemon_that_was_stopped_is_named_within_a_beat(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--no-prime") as mount:
        mount.file(0, 0).read_bytes()
        with opening(mount.file(0, 0)) as reader:
            until(lambda: reader.longest_s > 0, "it does not open")
            before = waits(mount)["daemon"]
            os.kill(mount.pid, signal.SIGSTOP)
            try:
                until(lambda: time.monotonic() - reader.began_s > 3, "it was answered by a stopped daemon")
            finally:
                os.kill(mount.pid, signal.SIGCONT)
            until(lambda: waits(mount)["daemon"] - before > 1.9, "it is not named")  # an idle beat is a second
        assert reader.longest_s >= 3


@needs_resend
def test_the_gap_of_a_death_is_a_takeover(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--no-prime", "--spare") as mount, opening(mount.file(0, 0)) as reader:
        until(lambda: reader.longest_s > 0, "it does not open")
        began_s = time.monotonic()
        kill(mount)
        assert waits(mount, "count")["takeover"] == 1
        assert 0 < waits(mount)["takeover"] <= time.monotonic() - began_s


def test_a_wait_for_a_commit_is_said_while_it_lasts_and_when_it_was_in_vain(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--steps", "0:9") as mount:
        with open(os.devnull, "w") as nowhere:
            reader = threading.Thread(target=lambda: nowhere.write(str(len(mount.file(3, 0).read_bytes()))))
            reader.start()
            until(lambda: mount.status()["waiting_for"], "nobody waits")
            shown = stepfs("status", mount.directory).stdout
            assert "now      waiting for step 3; 3 are committed; producer p0 " in shown
            assert f"its log is {mount.log}" in shown
            told = stepfs("doctor", mount.directory).stdout
            assert "waiting for step 3; 3 are committed" in told
            assert "the producers must act" in told
            with Producer(lake, producer_id="p0") as producer:
                producer.append([b"x"] * 2, position=3)
            reader.join()
        assert mount.status()["waiting_for"] is None
        assert waits(mount)["commit"] > 0.95 * waits(mount, "blocked_s") - waits(mount)["store"]
        assert not stepfs("status", mount.directory).stdout.count("refused")

    with mounted(lake, tmp_path / "n", "--wait", "1") as mount:
        assert not mount.file(5, 0).exists()
        (refused,) = mount.status()["refused"]
        assert (refused["step"], refused["error"]) == (5, "ENOENT")
        assert refused["why"].startswith("waited 1 s in vain: step 5 was not committed; 4 are committed; producer p0 ")
        line = next(line for line in stepfs("status", mount.directory).stdout.splitlines() if "refused" in line)
        assert refused["why"] in line
        assert line.endswith(f"its log is {mount.log}")
        assert refused["why"] in mount.log.read_text()
