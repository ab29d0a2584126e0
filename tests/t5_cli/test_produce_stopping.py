"""Signals and the terminal: what a person at the keyboard meets."""

from __future__ import annotations

import errno
import os
import pty
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from forked import Forked, one_core
from produced_text import documents_in, produce, text_in, texts_of

from stepfs.cli.failure import announce
from stepfs.store.local.local_store import LocalStore, explain
from stepfs_producer.run import session
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.prepare import LocatedPlan
from stepfs_producer.run.results import show_nothing
from stepfs_producer.run.session import Stopping


async def test_the_first_signal_asks_and_the_second_interrupt_abandons(capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    did: list[str] = []
    with Stopping(announce) as stopping:
        stopping.notify(lambda: did.append("abandon"))
        with stopping.between_steps(lambda: did.append("stop")):
            assert not stopping.requested
            signal.raise_signal(signal.SIGTERM)
            assert stopping.requested
            signal.raise_signal(signal.SIGTERM)  # a supervisor that repeats itself does not abandon anything
            await trio.testing.wait_all_tasks_blocked()
            assert did == ["stop", "stop"]
            signal.raise_signal(signal.SIGINT)
        await trio.testing.wait_all_tasks_blocked()
        assert did.pop() == "abandon"
        signal.raise_signal(signal.SIGTERM)  # nothing is under way any more
        await trio.testing.wait_all_tasks_blocked()
        assert did.pop() == "abandon"
    assert stopping.exit_code == 143
    err = capsys.readouterr().err
    assert err.count("stopping as soon as") == 2
    assert err.endswith("abandoned what was not committed yet; run the same command again to continue\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_a_signal_before_anybody_listens_is_not_forgotten() -> None:
    did: list[str] = []
    with Stopping(announce) as stopping:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        stopping.notify(lambda: did.append("abandon"))
    assert did == ["abandon"]


async def test_a_signal_while_nobody_reads_stderr_still_only_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`… 2>&1 | tee log`: the same Ctrl-C ends tee first, and what was appended is committed all the same."""
    ours, theirs = os.pipe()
    os.close(ours)
    did: list[str] = []
    with os.fdopen(theirs, "w", buffering=1) as stderr, Stopping(announce) as stopping:
        monkeypatch.setattr("sys.stderr", stderr)
        with stopping.between_steps(lambda: did.append("stop")):
            signal.raise_signal(signal.SIGINT)
            await trio.testing.wait_all_tasks_blocked()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), theirs)
    assert (stopping.exit_code, did) == (130, ["stop"])


@pytest.mark.logs("no space left on device; free space and retry")
def test_a_signal_does_not_wait_for_room_on_a_full_disk(file_url, corpus, monkeypatch) -> None:
    monkeypatch.setattr(session, "PATIENCE_S", 0.5)
    arguments = [file_url, "-i", corpus, "--slices", 1, "--ext", ".bin", "--seq-len", 16]

    def full(store, key, body):
        if "/log/" not in key or key.endswith(("0", "1", "2")):
            return create(store, key, body)
        signal.raise_signal(signal.SIGTERM)  # Python handles it in the main thread
        raise explain(OSError(errno.ENOSPC, "No space left on device"), store.root, f"create {key}")

    create = LocalStore._create
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "_create", full)
        done = produce(*arguments)
    assert done.returncode == 143, done.stderr
    assert "stepfs-produce: the store did not answer for 0.5 s: abandoned what was not committed yet" in done.stderr
    assert produce(*arguments).returncode == 0
    assert documents_in(text_in(file_url)) == texts_of(corpus)


async def test_a_signal_does_not_wait_for_a_store_that_is_silent(monkeypatch) -> None:
    monkeypatch.setattr(session, "PATIENCE_S", 0.05)
    said: list[str] = []
    with Stopping(said.append) as stopping, trio.CancelScope() as scope:
        stopping.notify(scope.cancel)
        run = session._RunSession(LocatedPlan(None), RunOptions("file:///lake"), stopping, said.append, show_nothing)
        with stopping.between_steps(lambda: None):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run.silence.watch, "s3://lake", trio.sleep_forever)
                nursery.start_soon(run._lose_patience)
                signal.raise_signal(signal.SIGTERM)
    assert scope.cancelled_caught
    assert said[1].startswith("the store did not answer for 0.05 s: abandoned")


def test_a_terminal_gets_a_progress_bar_on_stderr_only(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 200)
    ours, theirs = pty.openpty()
    words = ["text", file_url, "-i", tmp_path / "a.txt", "--slices", 1, "--seq-len", 64, "--ext", ".bin"]
    with Forked("stepfs_producer", *words, first=one_core, terminal=theirs) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the other end is closed
            while True:
                shown += os.read(ours, 65536)
        os.close(ours)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert out.startswith("text-0-of-1: ")
    assert out.count("\n") == 1
    assert b"steps" in shown
    assert b"text-0-of-1" in shown
