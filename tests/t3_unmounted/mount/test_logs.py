"""The daemon's log: fields, JSON, no credential, stacks on SIGUSR1, and alike lines once a minute in a file with a bound."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from fakemount import Caller, fails, mounted
from finished import ran

from stepfs.errors import CorruptError, StepfsError
from stepfs.mount import logs
from stepfs.mount.daemon import watchdog
from stepfs.mount.redact import redacted


def record(message, *args, exc_info=None, **facts):
    made = logging.LogRecord("stepfs.mount", logging.WARNING, "x.py", 1, message, args, exc_info)
    vars(made).update(facts)
    return made


def test_a_line_for_people_carries_its_facts():
    line = logs.Text(logs._TEXT).format(record("cannot read %s", "it", step=7, rank=1, group="a b", other="no"))
    assert line.endswith(' WARNING stepfs.mount: cannot read it  step=7 rank=1 group="a b"')
    assert logs.Text(logs._TEXT).format(record("plain")).endswith("stepfs.mount: plain")


def test_a_line_for_machines_is_one_object_whatever_it_says():
    try:
        raise CorruptError("two\nlines")  # noqa: TRY301 (a traceback is wanted)
    except CorruptError:
        line = logs.Json(Path("/m")).format(record('say "%s"\n', "ä", exc_info=sys.exc_info(), step=7, version=3))
    assert "\n" not in line
    body = json.loads(line)
    assert body.pop("traceback").endswith("CorruptError: two\nlines")
    assert body.pop("timestamp").endswith("Z")
    assert body == {
        "level": "WARNING", "logger": "stepfs.mount", "mount": "/m", "message": 'say "ä"\n', "step": 7, "log_version": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kept"), [
        ("key wJalrXUtnFEMI/K7 used", "key [redacted] used"),
        ("GET https://me:wJalrXUtnFEMI/K7@host/b", "GET https://[redacted]@host/b"),
        ("GET http://user:pw@host/b?x=1", "GET http://[redacted]@host/b?x=1"),
        ("?X-Amz-Credential=AKIA/x&X-Amz-Signature=abc&y=1",
         "?X-Amz-Credential=[redacted]&X-Amz-Signature=[redacted]&y=1"),
        ("aws_secret_access_key = abcdef", "aws_secret_access_key = [redacted]"),
        ('{"SessionToken": "abcdef"}', '{"SessionToken": "[redacted]"}'),
        ("s3://bucket/run: step 7, a ReaddirToken object", "s3://bucket/run: step 7, a ReaddirToken object"),
    ],
)  # fmt: skip
def test_credentials_are_struck_out(monkeypatch, text, kept):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")
    assert redacted(text) == kept
    assert kept in logs.Text(logs._TEXT).format(record("%s", text))
    assert json.loads(logs.Json(Path("/m")).format(record("%s", text)))["message"] == kept


def test_every_logger_of_the_process_is_configured():
    code = """
import logging, os
from pathlib import Path
from types import SimpleNamespace
from stepfs.mount import logs
from stepfs.mount.options import MountOptions
logs.configure_log(MountOptions("file:///lake", Path("/m"), log_format="json"))
logging.getLogger("stepfs.data").info("fetched", extra={"step": 3})
logging.getLogger("botocore").info("not ours")
logging.getLogger("botocore").warning("ours all the same")
"""
    done = ran([sys.executable, "-c", code], env={}, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["message"], line.get("step")) for line in lines] == [("fetched", 3), ("ours all the same", None)]


@pytest.mark.logs("cannot be read")
async def test_a_read_that_fails_says_step_slice_rank_and_version(caplog, monkeypatch):
    async with mounted(world=4) as m:
        m.commit(3)
        opened = await m.ops.open((await m.lookup("step-000000002", "rank-00003.pt")).st_ino, 0, Caller())

        async def corrupt(*_):
            raise CorruptError("x")

        monkeypatch.setattr(type(m.files.get(opened.fh).handle), "read", corrupt)
        with fails(5):
            await m.ops.read(opened.fh, 0, 10)
        facts = logs.facts_of(caplog.records[-1])
        assert facts == {"step": 2, "slice": 1, "rank": 2, "version": m.table.entry_if_loaded(2).version}


SLOW_MACHINE_S = 60.0


async def test_sigusr1_shows_the_threads(nursery, capfd):
    with watchdog.shown_on_signal(nursery):
        os.kill(os.getpid(), signal.SIGUSR1)
        shown = ""
        with trio.fail_after(SLOW_MACHINE_S):
            while not ("test_sigusr1_shows_the_threads" in shown and "_show_threads" in shown):  # the handler, the loop
                await trio.sleep(0.01)
                shown += capfd.readouterr().err


async def test_stacks_that_cannot_be_taken_end_nothing(nursery, monkeypatch):
    def no_descriptor():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(watchdog, "thread_stacks", no_descriptor)
    with watchdog.shown_on_signal(nursery):
        os.kill(os.getpid(), signal.SIGUSR1)
        await trio.testing.wait_all_tasks_blocked(0.05)


async def test_a_log_that_cannot_be_written_is_no_reason_to_end(nursery, monkeypatch):
    with suppress(OSError), Path("/dev/full").open("w") as full:  # noqa: ASYNC230 -- closing it fails, too
        monkeypatch.setattr(sys, "stderr", full)
        with watchdog.shown_on_signal(nursery):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
                await trio.testing.wait_all_tasks_blocked(0.05)


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
        self.handler.addFilter(logs.Repeats(self.clock))
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


def test_other_lines_pass(logged):
    for _ in range(5):
        say(logged, "a", "a")
    say(logged, "b", "b")
    for _ in range(2):
        logged.logger.warning("plain")
    logged.clock.now_s = logs.WINDOW_S
    say(logged, "a", "a again")
    assert logged.counts() == [("a", None), ("b", None), ("plain", None), ("plain", None), ("a again", 4)]


def test_only_so_many_kinds_are_remembered(logged, monkeypatch):
    monkeypatch.setattr(logs, "KINDS_MAX", 2)
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


def test_the_log_follows_its_name(tmp_path):
    """`logrotate` moves it away, or somebody deletes it: the daemon would fill a file that nobody finds."""
    log, moved = tmp_path / "log", tmp_path / "log.old"
    code = f"""
import logging, os
from pathlib import Path
from types import SimpleNamespace
from stepfs.mount.logs import FollowedLog
log = Path({str(log)!r})
handler = FollowedLog(log)
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
from types import SimpleNamespace
from stepfs.errors import RefusedError
from stepfs.mount.logs import FollowedLog
handler = FollowedLog(Path({str(log)!r}))
os.unlink({str(log)!r})
os.symlink({str(other)!r}, {str(log)!r})
for _ in range(9):
    handler.handle(logging.makeLogRecord({{"msg": "x" * 60}}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={}, timeout=60)
    assert other.read_text() == "precious"


def test_logs_of_mount_points_that_were_not_used_for_a_month_go(tmp_path, monkeypatch):
    monkeypatch.delenv("STEPFS_LOG_DIR", raising=False)
    monkeypatch.setattr("stepfs.mount.host.mount_table.mounts", lambda: [SimpleNamespace(directory="/mnt/lives")])
    lives, mine = (tmp_path / logs.log_file(Path(name)).name for name in ("/mnt/lives", "/mnt/mine"))
    others = [tmp_path / name for name in ("run-0123abcd.log", "run-0123abcd.log.1", "run-99999999.log", "notes.log")]
    for path in (lives, mine, *others):
        path.touch()
        if path != others[2]:
            os.utime(path, (0, 0))
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path))
    logs.remove_old_logs(mine)
    assert len(list(tmp_path.iterdir())) == 6, "a directory that others may share"
    monkeypatch.delenv("STEPFS_LOG_DIR")
    logs.remove_old_logs(mine)
    assert sorted(tmp_path.iterdir()) == sorted([lives, mine, *others[2:]])
