"""A loop of failures does not fill the disk: alike lines once a minute with a count, in a file with a bound."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakemount import Caller, fails, mounted

from stepfs.errors import CorruptError, StepfsError
from stepfs.mount import log_repeats, logs
from stepfs.mount.bounded_log import BYTES_MAX, LogHandler, cut
from stepfs.mount.log_repeats import Repeats


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Logged:
    """The daemon's handler on a stream that can be read, with a clock that a test turns."""

    def __init__(self, logger: str):
        self.clock, self.stream = Clock(), io.StringIO()
        self.handler = LogHandler(self.stream, repeats=Repeats(self.clock))
        self.handler.setFormatter(logs.Json(Path("/m")))
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


def test_other_lines_pass_and_bring_the_counts_of_minutes_that_are_over(logged):
    for _ in range(5):
        say(logged, "a", "a")
    say(logged, "b", "b")
    logged.logger.warning("plain")
    logged.logger.warning("plain")
    logged.clock.now_s = log_repeats.WINDOW_S
    logged.logger.warning("later")
    assert logged.counts() == [
        ("a", None), ("b", None), ("plain", None), ("plain", None), ("a", 4), ("later", None)
    ]  # fmt: skip
    say(logged, "a", "a again")
    assert logged.counts()[-1] == ("a again", None)


def test_what_was_left_out_is_counted_when_the_log_closes(logged):
    say(logged, "a", "first")
    for _ in range(3):
        say(logged, "a", "more")
    logged.handler.close()
    assert logged.counts() == [("first", None), ("more", 3)]


def test_more_kinds_than_are_remembered_lose_no_count(logged, monkeypatch):
    monkeypatch.setattr(log_repeats, "KINDS_MAX", 2)
    for key in ("a", "a", "b", "c", "a"):
        say(logged, key, key)
    assert logged.counts() == [("a", None), ("b", None), ("a", 1), ("c", None), ("a", None)]


def test_a_line_left_out_keeps_no_traceback_alive(logged):
    for _ in range(2):
        try:
            raise CorruptError("x")  # noqa: TRY301 (a traceback is wanted)
        except CorruptError:
            say(logged, "a", "failed", exc_info=True)
    logged.handler.close()
    assert ["traceback" in line for line in logged.lines()] == [True, False]


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
                monkeypatch.setattr(type(m.files.get(opened.fh)._handle), "read", failing)
                with fails(5):
                    await m.ops.read(opened.fh, turn, 10)
        assert len(logged.lines()) == 1
        logged.clock.now_s = log_repeats.WINDOW_S
        logged.logger.warning("failed")
        assert [line.get("repeated") for line in logged.lines()] == [None, 49, None]


def test_a_file_past_its_bound_keeps_its_newest_lines(tmp_path):
    log = tmp_path / "log"
    with log.open("ab") as file:
        for number in range(1000):
            file.write(b"line %d\n" % number)
            file.flush()
            cut(file.fileno(), 1000)
            assert log.stat().st_size <= 1000
    lines = log.read_text().splitlines()
    assert "older lines were dropped" in lines[0]
    numbers = [int(line.split()[1]) for line in lines[1:]]
    assert numbers == list(range(numbers[0], 1000))
    assert len(numbers) >= 20


def test_a_file_that_is_not_appended_to_is_left_alone(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write(b"x" * 2000)
        file.flush()
        cut(file.fileno(), 1000)
    assert log.stat().st_size == 2000


def test_the_daemons_log_is_bounded_while_it_runs_and_keeps_what_went_past_logging(tmp_path):
    code = """
import logging, os
from pathlib import Path
from stepfs.mount import logs
logs.configure(Path("/m")).bytes_max = 10_000
for number in range(1000):
    logging.getLogger("stepfs.mount").warning("line %d", number)
os.write(2, b"from faulthandler\\n")
"""
    log = tmp_path / "log"
    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", code], stderr=output, check=True, env={}, timeout=60)
    lines = log.read_text().splitlines()
    assert log.stat().st_size < 10_100
    assert [line.rsplit(None, 1)[1] for line in lines[-2:]] == ["999", "faulthandler"]
    assert BYTES_MAX == 16 << 20
    assert os.stat(log).st_nlink == 1
