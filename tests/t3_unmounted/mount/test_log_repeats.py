"""A loop of failures does not fill the disk: alike lines once a minute with a count, in a file with a bound."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from fakemount import Caller, fails, mounted

from stepfs.errors import CorruptError, StepfsError
from stepfs.mount import daemon


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Logged:
    """The daemon's handler on a stream that can be read, with a clock that a test turns."""

    def __init__(self, logger: str):
        self.clock, self.stream = Clock(), io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.addFilter(daemon.Repeats(self.clock))
        self.handler.setFormatter(daemon.Json(Path("/m")))
        self.logger = logging.getLogger(logger)

    def __enter__(self):
        self.logger.addHandler(self.handler)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self.handler)
        self.handler.close()

    def lines(self):
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def counts(self):
        return [(line["message"], line.get("repeated")) for line in self.lines()]


@pytest.fixture
def logged():
    with Logged("alike-test") as logged:
        yield logged


def say(logged, key, text="x", **more):
    logged.logger.warning(text, extra={"alike": key}, **more)


def test_alike_lines_are_logged_once_a_minute_with_a_count(logged):
    for second in range(181):
        logged.clock.now_s = float(second)
        say(logged, ("slice", 1), f"at {second}")
    assert logged.counts() == [("at 0", None), ("at 60", 59), ("at 120", 59), ("at 180", 59)]


def test_other_lines_pass(logged):
    for _ in range(5):
        say(logged, "a", "a")
    say(logged, "b", "b")
    for _ in range(2):
        logged.logger.warning("plain")
    logged.clock.now_s = daemon.WINDOW_S
    say(logged, "a", "a again")
    assert logged.counts() == [("a", None), ("b", None), ("plain", None), ("plain", None), ("a again", 4)]


def test_only_so_many_kinds_are_remembered(logged, monkeypatch):
    monkeypatch.setattr(daemon, "KINDS_MAX", 2)
    for key in ("a", "b", "a", "c", "b"):
        say(logged, key, key)
    assert [line["message"] for line in logged.lines()] == ["a", "b", "c", "b"]


@pytest.mark.logs("cannot be read", "failed")
@pytest.mark.parametrize("kind", [CorruptError, StepfsError, ValueError])
async def test_a_loop_of_failing_reads_is_one_line(monkeypatch, kind):
    """Each turn opens the file anew, as a DataLoader's retry does."""
    with Logged("stepfs.mount") as logged:
        async with mounted(world=4) as m:
            m.commit(3)
            inode = (await m.lookup("step-000000002", "rank-00003.pt")).st_ino

            async def failing(*_):
                raise kind("x")

            for turn in range(50):
                opened = await m.ops.open(inode, 0, Caller())
                monkeypatch.setattr(type(m.files.get(opened.fh).handle), "read", failing)
                with fails(5):
                    await m.ops.read(opened.fh, turn, 10)
        assert len(logged.lines()) == 1


def test_the_daemons_log_is_bounded_while_it_runs_and_keeps_what_went_past_logging(tmp_path):
    log = tmp_path / "log"
    code = """
import logging, os, sys
from pathlib import Path
from stepfs.mount import daemon
from stepfs.mount.daemon import BoundedLog
daemon.configure_log(Path("/m"), BoundedLog(Path(sys.argv[1]), 10_000))
for number in range(1000):
    logging.getLogger("stepfs.mount").warning("line %d", number)
os.write(2, b"from faulthandler\\n")
"""
    with log.open("ab") as output:
        command = [sys.executable, "-c", code, str(log)]
        subprocess.run(command, stdout=output, stderr=output, check=True, env={}, timeout=60)
    older = tmp_path / "log.1"
    assert sorted(tmp_path.iterdir()) == [log, older]
    assert log.stat().st_size <= 10_100
    assert older.stat().st_size <= 10_000
    numbers = [int(line.split()[-1]) for line in (older.read_text() + log.read_text()).splitlines()[:-1]]
    assert numbers == list(range(numbers[0], 1000))
    assert log.read_text().endswith("from faulthandler\n")


def test_the_log_follows_its_name(tmp_path):
    """`logrotate` moves it away, or somebody deletes it: the daemon would fill a file that nobody finds."""
    log, moved = tmp_path / "log", tmp_path / "log.old"
    code = f"""
import logging, os
from pathlib import Path
from stepfs.mount.daemon import BoundedLog
log = Path({str(log)!r})
handler = BoundedLog(log, 10_000)
def say(text):
    handler.handle(logging.makeLogRecord({{"msg": text}}))
say("first")
log.rename({str(moved)!r})
say("second")
os.write(2, b"from faulthandler\\n")
log.unlink()
log.mkdir()
say("third")  # nowhere to write: the file that was open takes it
log.rmdir()
say("fourth")
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={}, timeout=60)
    assert moved.read_text() == "first\n"
    assert log.read_text() == "fourth\n"


def test_a_link_in_the_place_of_the_log_is_not_written_through(tmp_path):
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("precious")
    code = f"""
import logging, os
from pathlib import Path
from stepfs.errors import RefusedError
from stepfs.mount.daemon import BoundedLog
handler = BoundedLog(Path({str(log)!r}), 100)
os.unlink({str(log)!r})
os.symlink({str(other)!r}, {str(log)!r})
for _ in range(9):
    handler.handle(logging.makeLogRecord({{"msg": "x" * 60}}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={}, timeout=60)
    assert other.read_text() == "precious"
