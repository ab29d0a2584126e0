"""Killed with -9 at random moments, beside a producer that is not: every record exactly once, one order."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from produced_text import PROGRAM, documents_in, text_in, texts_of

from stepfs.errors import AbsentError
from stepfs.format.ids import Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer.cli.text_plan import LakeShape, text_plan
from stepfs_producer.plan.file.digest import plan_text
from stepfs_producer.run.options import TextOptions


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
        ("file", 3),  # one while it starts, two among its commits
        pytest.param("file", 20),
        pytest.param("s3", 5),
    ],
    indirect=["lake_url"],
)
@pytest.mark.slow
def test_every_record_exactly_once_across_kills(lake_url: str, kills: int, tmp_path: Path) -> None:
    """Two shards of a corpus, in the shape that `stepfs-produce text` gives them, at a pace that can be hit."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    moments = random.Random(20)
    for n in range(60 + 5 * kills):  # a minute and more for the steady one, at its pace
        (corpus / f"{n}.txt").write_bytes(moments.randbytes(moments.randrange(1, 6000)).hex().encode())
    shape = LakeShape(2, ".bin")
    commands = []
    for index in range(2):
        options = TextOptions(batch_size=4, seq_len=64, shard=f"{index}/2")
        plan = text_plan([str(corpus)], shape, options, None)
        file = tmp_path / f"{index}.yaml"
        file.write_text(plan_text(plan))
        commands.append([PROGRAM, "run", str(file), lake_url, "--producer-id", f"text-{index}-of-2"])
    steady = subprocess.Popen([*commands[0], "--workers", "1", "--steps-per-second", "4"])
    while not epochs(lake_url):
        time.sleep(0.05)
    victim = steady
    views = [look(lake_url)]
    try:
        for kill in range(kills):
            epoch = views[-1].epochs.get("text-1-of-2", 0)
            victim = subprocess.Popen([*commands[1], "--workers", "1", "--steps-per-second", "40"])
            if kill % 4 == 0:  # while it starts
                time.sleep(moments.uniform(0.3, 0.8))
            else:  # while it uploads and commits
                while epochs(lake_url).get("text-1-of-2", 0) == epoch:
                    assert victim.poll() is None
                    time.sleep(0.05)  # a look costs as much as starting takes of the core
                time.sleep(moments.uniform(0.0, 0.9))
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
    for command in commands:
        subprocess.run(command, check=True, timeout=100)

    parts = [documents_in(text_in(lake_url, producer=f"text-{index}-of-2")) for index in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(texts_of(corpus))
    final = look(lake_url)
    assert all(view.order == final.order[: len(view.order)] for view in views)
    assert final.epochs["text-1-of-2"] > kills // 2
    assert len({len(view.order) for view in views}) > kills // 2  # the kills did fall among commits


def epochs(lake: str) -> dict[str, int]:
    try:
        return look(lake, steps=False).epochs
    except AbsentError:
        return {}
