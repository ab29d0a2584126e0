"""SIGUSR1 shows what every thread and task waits for, and never ends the daemon."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import trio
import trio.testing

from stepfs.mount.health import stacks

SLOW_MACHINE_S = 60.0


async def test_sigusr1_shows_threads_and_tasks(nursery, capfd):
    async def waits_for_something_nameable():
        await trio.sleep_forever()

    nursery.start_soon(waits_for_something_nameable)
    with stacks.shown_on_signal(nursery):
        os.kill(os.getpid(), signal.SIGUSR1)
        shown = ""
        with trio.fail_after(SLOW_MACHINE_S):
            while "waits_for_something_nameable" not in shown:
                await trio.sleep(0.01)
                shown += capfd.readouterr().err
    assert "test_sigusr1_shows_threads_and_tasks" in shown


async def test_stacks_that_cannot_be_taken_end_nothing(nursery, monkeypatch):
    def no_descriptor():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(stacks, "thread_stacks", no_descriptor)
    with stacks.shown_on_signal(nursery):
        os.kill(os.getpid(), signal.SIGUSR1)
        await trio.testing.wait_all_tasks_blocked(0.05)


async def test_a_log_that_cannot_be_written_is_no_reason_to_end(nursery, monkeypatch):
    with suppress(OSError), Path("/dev/full").open("w") as full:  # noqa: ASYNC230 -- closing it fails, too
        monkeypatch.setattr(sys, "stderr", full)
        with stacks.shown_on_signal(nursery):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
                await trio.testing.wait_all_tasks_blocked(0.05)
