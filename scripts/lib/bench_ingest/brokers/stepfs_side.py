"""A lake on SeaweedFS: a producer, and a mount that shows what it commits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import servers
import trio

from bench.machine import BIN, let_go, program, run
from bench_ingest.brokers.payloads import number_of, payload
from bench_ingest.brokers.sides import Losses, read_until_killed
from stepfs import __version__
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer, Producer
from torture.server import Server

_AT_ONCE = 8


class Lake:
    """A `Side`. `durable`: the server acknowledges what is on the disk; by default it leaves that to the kernel."""

    name = "stepfs on SeaweedFS"
    note = "one object per payload"

    def __init__(self, *, durable: bool) -> None:
        self.settings = "fsync" if durable else "default"
        self._durable = durable
        self._server: Server | None = None
        self._directory = Path()
        self._number = 0

    @property
    def version(self) -> str:
        return f"stepfs {__version__}"

    @contextmanager
    def running(self, directory: Path) -> Iterator[None]:
        directory.mkdir()
        self._directory = directory
        with Server(directory / "seaweedfs", seed=0, probabilities="", durable=self._durable) as self._server:
            os.environ.update(self._server.environment())
            yield

    def rate(self, size: int, count: int) -> float:
        return trio.run(self._rate, size, count)

    async def _rate(self, size: int, count: int) -> float:
        url, body = await self._lake(), payload(0, size)
        async with AsyncProducer(url, producer_id="bench", uploads=_AT_ONCE) as producer:
            began = time.monotonic()
            for step in range(count):
                await producer.append([body], position=step)
            await producer.flush()
            return size * count / (time.monotonic() - began)
        raise AssertionError

    def latencies(self, size: int, count: int, gap_s: float) -> list[float]:
        url, body, sent = trio.run(self._lake), payload(0, size), []
        with self._mounted(url) as directory:
            command = program("bench_read.programs.watch_steps", str(directory), "0", str(count))
            with (
                Popen(command, stdout=PIPE, text=True) as watcher,
                Producer(url, producer_id="bench") as producer,
            ):
                assert watcher.stdout is not None
                assert watcher.stdout.readline()
                for step in range(count):
                    sent.append(time.monotonic())
                    producer.append([body], position=step)
                    time.sleep(max(0.0, sent[-1] + gap_s - time.monotonic()))
                readable = [float(line) for line in watcher.stdout]
        return [seen - begun for begun, seen in zip(sent, readable, strict=True)]

    def losses(self, size: int, count: int) -> Losses:
        url = trio.run(self._lake)
        command = program("bench_ingest.brokers.stepfs_client", url, str(size))
        acknowledged = read_until_killed(command, count, self._kill)
        assert self._server is not None
        self._server.tend(time.monotonic())
        with self._mounted(url) as directory:
            steps = sorted(directory.glob("step-*"))
            found = [number_of((step / "rank-00000.bin").read_bytes()) for step in steps]
        return Losses.of(acknowledged, [number for number in found if number is not None])

    def _kill(self) -> None:
        assert self._server is not None
        self._server.kill(time.monotonic(), 0.0)

    async def _lake(self) -> str:
        self._number += 1
        url = f"s3://{servers.BUCKET}/ingest-{self._number}"
        store = open_store(url)
        await create_lake(store, slices=1, ext=".bin")
        await store.aclose()
        return url

    @contextmanager
    def _mounted(self, url: str) -> Iterator[Path]:
        directory = self._directory / f"mnt-{self._number}"
        directory.mkdir()
        run([str(BIN / "stepfs"), "mount", url, str(directory)])
        try:
            yield directory
        finally:
            let_go(directory)
