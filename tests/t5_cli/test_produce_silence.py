"""`stepfs-produce text` on a store that accepts connections and says nothing: from the start, and in the middle."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
from faultproxy import FaultProxy
from test_cli_silence import LAKE, mute
from test_produce_text import corpus

from stepfs.errors import StoreSilentError
from stepfs.store.silence import Silence

__all__ = ["corpus", "mute"]  # fixtures

BEAR_S = 2.0
# The command with less patience than in earnest.
PRODUCE = f"""
from stepfs.store import silence
from stepfs.store.s3.s3_store import S3Store
from stepfs_producer import settings
S3Store.__init__.__kwdefaults__["commit_timeout_s"] = 1.0
silence.SAY_AFTER_S, silence.GIVE_UP_AFTER_S, settings.GIVE_UP_AFTER_S = 0.5, {{start_s}}, {BEAR_S}
from stepfs_producer.cli import main
main()
"""


def command(lake: str, endpoint_url: str, *options: object, start_s: float) -> list[str]:
    words = ["text", lake, "--endpoint-url", endpoint_url, "--slices", 1, "--ext", ".bin", *options]
    return [sys.executable, "-c", PRODUCE.format(start_s=start_s), *map(str, words)]


def test_from_the_start(mute: str, corpus: Path) -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        command(LAKE, mute, "-i", corpus, start_s=1.0),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert time.monotonic() - began_s < 60  # four time-outs of 20 s without it
    waiting, gave_up = done.stderr.splitlines()
    assert waiting == f"stepfs-produce: waiting for {LAKE}: no answer yet; gives up after 1 s"
    assert gave_up.startswith(f"stepfs-produce: {LAKE}: no answer for 1 s; check the network")
    assert (done.returncode, done.stdout) == (6, "")


async def test_in_the_middle(s3_url: str, fault_proxy: FaultProxy, corpus: Path) -> None:
    """It bears longer than at its start, says so as soon, and ends then, whatever it was doing."""
    paced = ["--seq-len", 8, "--batch-size", 1, "--steps-per-second", 20]
    words = command(s3_url, fault_proxy.endpoint_url, "-i", corpus, *paced, start_s=60.0)
    ended: list[subprocess.CompletedProcess[bytes]] = []

    async def produce() -> None:
        ended.append(await trio.run_process(words, capture_stdout=True, capture_stderr=True, check=False))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(produce)
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


def watched() -> tuple[Silence, list[str]]:
    heard: list[str] = []
    return Silence(heard.append, say_after_s=0.1, give_up_after_s=0.5), heard


async def test_requests_that_fail_without_an_answer_are_one_silence() -> None:
    """Each ends by its own time-out and is tried again: neither the line nor the end may wait for ever."""
    silence, heard = watched()

    async def time_out() -> None:
        await trio.sleep(0.15)
        raise TimeoutError

    tries = 0
    with pytest.raises(StoreSilentError), trio.fail_after(10):
        while True:
            tries += 1
            with pytest.raises(TimeoutError):
                await silence.watch("s3://x", time_out)
    assert tries == 4
    assert heard == ["waiting for s3://x: no answer yet; gives up after 0.5 s"]
    with pytest.raises(StoreSilentError):  # at once: it has been silent for long enough
        await silence.watch("s3://x", trio.sleep_forever)


async def test_an_answer_ends_a_silence_and_time_without_requests_is_none() -> None:
    silence, heard = watched()

    async def time_out() -> None:
        await trio.sleep(0.3)
        raise TimeoutError

    async def answer() -> None:
        silence.note_sign_of_life()

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await silence.watch("s3://x", time_out)
        await trio.sleep(0.4)
        await silence.watch("s3://x", answer)
    assert len(heard) == 3


async def test_more_patience_from_now_on() -> None:
    silence, heard = watched()
    silence.set_limit(1.0)
    began_s = trio.current_time()
    with pytest.raises(StoreSilentError, match="no answer for 1 s"):
        await silence.watch("s3://x", trio.sleep_forever)
    assert trio.current_time() - began_s > 0.9
    assert heard == ["waiting for s3://x: no answer yet; gives up after 1 s"]
