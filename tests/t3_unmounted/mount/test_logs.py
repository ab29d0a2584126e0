"""The daemon's log: facts as fields, one line per event in JSON, no credential whoever wrote it, and stacks on
SIGUSR1.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from fakemount import Caller, fails, mounted
from finished import ran

from stepfs.errors import CorruptError, UsageError
from stepfs.mount import daemon
from stepfs.mount.health import watchdog
from stepfs.mount.redact import redacted


def record(message, *args, exc_info=None, **facts):
    made = logging.LogRecord("stepfs.mount", logging.WARNING, "x.py", 1, message, args, exc_info)
    vars(made).update(facts)
    return made


def test_a_line_for_people_carries_its_facts():
    line = daemon.Text(daemon._TEXT).format(record("cannot read %s", "it", step=7, rank=1, group="a b", other="no"))
    assert line.endswith(' WARNING stepfs.mount: cannot read it  step=7 rank=1 group="a b"')
    assert daemon.Text(daemon._TEXT).format(record("plain")).endswith("stepfs.mount: plain")


def test_a_line_for_machines_is_one_object_whatever_it_says():
    try:
        raise CorruptError("two\nlines")  # noqa: TRY301 (a traceback is wanted)
    except CorruptError:
        line = daemon.Json(Path("/m")).format(record('say "%s"\n', "ä", exc_info=sys.exc_info(), step=7, version=3))
    assert "\n" not in line
    body = json.loads(line)
    assert body.pop("traceback").endswith("CorruptError: two\nlines")
    assert body.pop("time").endswith("Z")
    assert body == {
        "level": "WARNING", "logger": "stepfs.mount", "mount": "/m", "message": 'say "ä"\n', "step": 7, "version": 3
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
    assert kept in daemon.Text(daemon._TEXT).format(record("%s", text))
    assert json.loads(daemon.Json(Path("/m")).format(record("%s", text)))["message"] == kept


def test_an_unknown_format_is_refused(monkeypatch):
    monkeypatch.setenv("STEPFS_LOG_FORMAT", "xml")
    with pytest.raises(UsageError, match="write text or json"):
        daemon.chosen_format()


def test_every_logger_of_the_process_is_configured():
    code = """
import logging, os
from pathlib import Path
from stepfs.mount import daemon
daemon.configure_log(Path("/m"))
logging.getLogger("stepfs.data").info("fetched", extra={"step": 3})
logging.getLogger("botocore").info("not ours")
logging.getLogger("botocore").warning("ours all the same")
"""
    done = ran([sys.executable, "-c", code], env={"STEPFS_LOG_FORMAT": "json"}, check=True)
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
        facts = daemon.facts_of(caplog.records[-1])
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
