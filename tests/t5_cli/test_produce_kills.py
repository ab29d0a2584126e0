"""Killed with -9 at random moments, beside a producer that is not: every record exactly once, one order."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio
from test_produce_text import PROGRAM, committed, planned, produce

from stepfs.format.ids import Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer.cli.ensure_lake import ensure_lake
from stepfs_producer.text.records import Shard
from stepfs_producer.text.steps import Shape


@dataclass(frozen=True)
class Seen:
    """What a reader that starts now sees."""

    order: list[tuple[int, str, int, str]]  # (version, producer, seq, object) of every step
    epochs: dict[str, int]


def look(lake: str, *, steps: bool = True) -> Seen:
    async def read() -> Seen:
        store = open_store(lake)
        log = await LogReader.open(store, await open_lake(store))
        entries = [await log.entry(Step(number)) for number in range(log.state.next_step * steps)]
        await store.aclose()
        return Seen(
            [(entry.version, entry.producer_id, entry.tgb.seq, entry.tgb.key) for entry in entries],
            {name: producer.epoch for name, producer in log.state.producers.items()},
        )

    return trio.run(read)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lake_url", "kills"),
    [
        ("file", 5),
        pytest.param("file", 20, marks=pytest.mark.slow),
        pytest.param("s3", 5, marks=pytest.mark.slow),
    ],
    indirect=["lake_url"],
)
def test_every_record_exactly_once_across_kills(lake_url: str, kills: int, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    moments = random.Random(20)
    for n in range(160):
        (corpus / f"{n}.txt").write_bytes(moments.randbytes(moments.randrange(1, 6000)).hex().encode())
    trio.run(partial(ensure_lake, lake_url, 2, ".bin", None, check_ext=str))
    command = [PROGRAM, "text", lake_url, "-i", str(corpus), "--seq-len", "64", "--batch-size", "4"]
    steady = subprocess.Popen([*command, "--shard", "0/2", "--steps-per-second", "8"])
    victim = steady
    views = [look(lake_url)]
    try:
        for kill in range(kills):
            epoch = views[-1].epochs.get("text-1-of-2", 0)
            victim = subprocess.Popen([*command, "--shard", "1/2", "--steps-per-second", "40"])
            if kill % 4 == 0:  # while it starts
                time.sleep(moments.uniform(0.3, 0.8))
            else:  # while it uploads and commits
                while look(lake_url, steps=False).epochs.get("text-1-of-2", 0) == epoch:
                    assert victim.poll() is None
                    time.sleep(0.05)  # a look costs as much as starting takes of the core
                time.sleep(moments.uniform(0.0, 0.6))
            assert victim.poll() is None, "the corpus is too small: it was finished before the last kill"
            victim.kill()
            victim.wait()
            views.append(look(lake_url))
        steady.send_signal(signal.SIGTERM)
        assert steady.wait(100) == 128 + signal.SIGTERM
    finally:
        for process in (steady, victim):
            process.kill()
            process.wait()
    for shard in ("0/2", "1/2"):
        assert produce(*command[2:], "--shard", shard).returncode == 0

    steps = committed(lake_url)
    for index in range(2):
        mine = [payloads for producer, payloads in steps if producer == f"text-{index}-of-2"]
        assert mine == planned(corpus, Shape(2, 4, 64, ".bin"), Shard(index, 2))
    final = look(lake_url)
    assert len(final.order) == len(steps)
    assert all(view.order == final.order[: len(view.order)] for view in views)
    assert final.epochs["text-1-of-2"] > kills // 2
    assert len({len(view.order) for view in views}) > kills // 2  # the kills did fall among commits
