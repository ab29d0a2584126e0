"""Data lives as long as a kept checkpoint may need it: a real training loop, a reclaimer, and all that may kill it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from finished import ran
from lakes import stepfs
from lakework import list_groups
from realmount import STEPFS, mounted, payload, until

from stepfs.format.ids import Step
from stepfs.format.keys import data_prefix
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer import Producer

TRAIN = Path(__file__).with_name("train_with_dcp.py")
STEPS, EVERY, LEAD = 100, 10, 20
KILLS = 50
GRACE_S = 10  # for a mount to see a checkpoint, and to fetch what is open, before the objects go


def payloads(step: int) -> list[bytes]:
    return [payload(step, index) for index in range(2)]


def produce(url: str, steps: int, *, max_lead: int | None = None) -> None:
    with Producer(url, producer_id="p", max_lead=max_lead) as producer:
        for step in range(steps):
            producer.append(payloads(step), position=step)


class Look:
    """What a lake holds and needs now, as its objects say."""

    def __init__(self, url: str) -> None:
        trio.run(self._read, url)

    async def _read(self, url: str) -> None:
        store = open_store(url)
        identity = await open_lake(store)
        # In this order: what is needed at last has been needed all the time.
        log = await LogReader.open(store, identity)
        self.objects = {entry.key for entry in await store.list(data_prefix(identity.lake_id))}
        groups = await list_groups(store, identity)
        self.committed = log.state.next_step
        live = list(groups.values())
        self.kept = live[0].kept if live else ()
        first = min((group.need for group in live), default=Step(0))
        self.needed = {
            (await log.entry(Step(step))).tgb.key
            for step in range(max(first, log.first_live_step), log.state.next_step)
        }
        self.need = first
        self.first_live_step = log.first_live_step
        await store.aclose()


@contextmanager
def reclaiming(url: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*STEPFS, "reclaim", url, *options], stdout=subprocess.DEVNULL)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=100) == 130
    finally:
        process.kill()
        process.wait()


def trained(*arguments: object) -> dict[int, str]:
    """Step → what was read, of a training loop that ran to its end."""
    done = ran([sys.executable, str(TRAIN), *map(str, arguments)], timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow  # t1's test_kept_checkpoints has the rules
@pytest.mark.timeout(300)
def test_a_training_loop_that_keeps_its_last_two_checkpoints(s3_url, tmp_path):
    assert stepfs("init", s3_url, "--slices", 2, "--ext", ".bin").code == 0
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    options = ["--group", "train", "--checkpoint-dir", str(checkpoints), "--wait", "120", "--ranks", "0-1"]
    with mounted(s3_url, tmp_path / "m", *options) as mount:
        producer = threading.Thread(target=produce, args=(s3_url, STEPS), kwargs={"max_lead": LEAD})
        producer.start()
        seen: dict[int, str] = {}
        loop = threading.Thread(target=lambda: seen.update(trained(mount.directory, checkpoints, STEPS, EVERY)))
        loop.start()
        most = 0
        with reclaiming(s3_url, "--every", "0.5s"):
            while loop.is_alive():
                look = Look(s3_url)
                assert look.needed <= look.objects
                most = max(most, len(look.objects))
                loop.join(0.2)
            producer.join()
            assert sorted(seen) == list(range(STEPS))
            until(lambda: Look(s3_url).kept == (STEPS - EVERY, STEPS), "the last checkpoint is not recorded")
            until(lambda: len(Look(s3_url).objects) == EVERY, "something unneeded is kept")
        assert most <= 2 * LEAD
        final = Look(s3_url)
        assert final.objects == final.needed
        assert (final.need, final.first_live_step) == (STEPS - EVERY, STEPS - EVERY)
        until(lambda: len(mount.steps()) == EVERY, "steps that nobody needs are still shown")

        older = checkpoints / f"step-{STEPS - EVERY}"
        again = trained(mount.directory, checkpoints, STEPS, EVERY, older)
        assert again == {step: seen[step] for step in range(STEPS - EVERY, STEPS)}


def command(environment: dict[str, str], arguments: list[str]) -> None:
    """`stepfs …` in a process that has been forked with everything imported."""
    from stepfs.cli import main  # noqa: PLC0415

    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["stepfs", *arguments]
    main()


class Forked:
    """Commands without the second of importing: a server with all modules loaded forks for each of them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["stepfs.cli.app", "stepfs.lake.reclaim.run", "stepfs.store.s3.s3_store"])
        self._environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    def start(self, *arguments: str) -> multiprocessing.Process:
        process = self._context.Process(target=command, args=(self._environment, list(arguments)))
        process.start()
        return process  # type: ignore[return-value]

    def run(self, *arguments: str) -> float:
        """Seconds it took."""
        began = time.monotonic()
        process = self.start(*arguments)
        process.join(120)
        assert process.exitcode == 0, arguments
        return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_reclaim_killed_at_fifty_moments_two_at_once_and_readers_open(s3_url, tmp_path):
    assert stepfs("init", s3_url, "--slices", 2, "--ext", ".bin").code == 0
    produce(s3_url, 4 * KILLS)
    forked, moments = Forked(), random.Random(50)
    with mounted(s3_url, tmp_path / "m", "--group", "train", "--no-prime") as mount:
        reclaim = ("reclaim", s3_url, "--grace", str(GRACE_S))
        forked.run(*reclaim)  # the fork server starts
        usual_s = forked.run(*reclaim)
        killed, need, held = 0, 0, []
        while killed < KILLS:
            need += 2
            assert need < 4 * KILLS, "too few of the kills fell while it ran"
            held.append((need - 1, mount.file(need - 1, 0).open("rb")))
            forked.run("checkpoint", s3_url, "--group", "train", "--new-group", str(need), "--keep", "1")
            running = [forked.start(*reclaim) for _ in range(1 + killed % 2)]
            for process in running:
                time.sleep(moments.uniform(0, 1.1 * usual_s / len(running)))
                process.kill()
                process.join(60)
                assert process.exitcode in {0, -signal.SIGKILL}
                killed += process.exitcode != 0
            look = Look(s3_url)
            assert look.need == need
            assert look.needed <= look.objects, "something needed was deleted"
            assert len(look.needed) == look.committed - need

        def reclaimed_by_two() -> bool:
            pair = [forked.start(*reclaim) for _ in range(2)]
            for process in pair:
                process.join(120)
            assert [process.exitcode for process in pair] == [0, 0]
            return Look(s3_url).first_live_step == need

        until(reclaimed_by_two, "steps are kept for longer than the grace", within_s=60 + GRACE_S)
        final = Look(s3_url)
        assert final.objects == final.needed, "something unneeded was kept"
        assert stepfs(*reclaim, "--json").document["deleted"] == {"objects": 0, "bytes": 0}
        for step, file in held:
            assert file.read() == payload(step, 0), "an open file must stay readable"
            file.close()
        until(lambda: len(mount.steps()) == final.committed - need, "the view is not behind the checkpoint")
        for step in range(need, final.committed):
            assert [mount.file(step, rank).read_bytes() for rank in (0, 1)] == payloads(step)
