"""`stepfs-produce text` on a store that accepts connections and says nothing: from the start, and in the middle."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import trio
from faultproxy import FaultProxy
from finished import ran
from test_cli_patience import LAKE, mute

__all__ = ["mute"]  # fixtures

BEAR_S = 2.0
# The command with less patience than in earnest.
PRODUCE = f"""
from stepfs.store import silence
from stepfs.store.s3.s3_store import S3Store
from stepfs_producer.commit import producer
S3Store.__init__.__kwdefaults__["commit_timeout_s"] = 1.0
silence.SAY_AFTER_S, silence.GIVE_UP_AFTER_S, producer.GIVE_UP_AFTER_S = 0.5, {{start_s}}, {BEAR_S}
from stepfs_producer.cli import main
main()
"""


def command(lake: str, endpoint_url: str, *options: object, start_s: float) -> list[str]:
    words = ["text", lake, "--endpoint-url", endpoint_url, "--slices", 1, "--ext", ".bin", *options]
    return [sys.executable, "-c", PRODUCE.format(start_s=start_s), *map(str, words)]


def test_from_the_start(mute: str, corpus: Path) -> None:
    began_s = time.monotonic()
    done = ran(command(LAKE, mute, "-i", corpus, start_s=1.0))
    assert time.monotonic() - began_s < 60  # four time-outs of 20 s without it
    waiting, gave_up = done.stderr.splitlines()
    assert waiting == f"stepfs-produce: waiting for {LAKE}: no answer yet; gives up after 1 s"
    assert gave_up.startswith(f"stepfs-produce: {LAKE}: no answer for 1 s; check the network")
    assert (done.returncode, done.stdout) == (6, "")


async def test_in_the_middle(s3_url: str, fault_proxy: FaultProxy, corpus: Path, tmp_path: Path) -> None:
    """It bears longer than at its start, says so as soon, and ends then, whatever it was doing."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"output: {{mesh: dp=1, sequence_length: 8, ext: .bin}}\nsources: {{a: {{format: text, files: {corpus}}}}}\n"
    )
    words = ["run", plan, s3_url, "--endpoint-url", fault_proxy.endpoint_url, "--steps-per-second", 20]
    words = [sys.executable, "-c", PRODUCE.format(start_s=60.0), *map(str, words), "--workers", "1"]
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
