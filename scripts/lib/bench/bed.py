"""What the reading benchmarks stand on: a server, lakes, mounts, fresh reader processes; gone when they end.

SeaweedFS is started the way the tests start it. Everything is measured through the doors users have: `Producer`, the
`stepfs` command, paths, and the counters under `.stepfs/`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import servers
import trio

from bench.machine import BIN, COMMAND_S, MIB, cpu_s, forget_variables, let_go, program, rss, run, until
from bench.report import Report, at_least, median
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store
from stepfs_producer import Producer


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. Sizes in bytes."""

    file_bytes: int = 64 * MIB
    rounds: int = 5
    small_steps: int = 64
    small_ranks: int = 64
    small_bytes: int = 16 << 10
    workers: int = 8
    commits: int = 200
    long_steps: int = 1_000_000
    touch_bytes: int = 4 << 30
    urgent: bool = False  # readers go before everything else

    @classmethod
    def quick(cls) -> Plan:
        """Shows that everything works, and measures nothing that is worth quoting."""
        return cls(
            file_bytes=2 * MIB, rounds=2, small_steps=4, small_ranks=8, workers=2, commits=10, long_steps=20_000,
            touch_bytes=64 * MIB,
        )  # fmt: skip


@dataclass
class Mount:
    """A lake mounted by the `stepfs` command."""

    directory: Path
    pid: int
    ready_s: float
    ext: str
    own_reads: dict[str, int] = field(default_factory=dict)  # what looking at the counters costs

    def path(self, step: int, rank: int) -> Path:
        return self.directory / f"step-{step:09d}" / f"rank-{rank:05d}{self.ext}"

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.directory / ".stepfs/status.json").read_text())
        return document

    def data(self) -> dict[str, int]:
        """`stepfs.data.counters` of this mount."""
        counts: dict[str, int] = self.status()["data"]
        return counts

    def requests(self) -> dict[str, int]:
        """File system requests so far, without those made to ask for them since the last time."""
        found: dict[str, int] = self.status()["requests"]
        again: dict[str, int] = self.status()["requests"]
        self.own_reads = {name: again[name] - found.get(name, 0) for name in again}
        return again

    def spent(self, before: dict[str, int]) -> dict[str, int]:
        """Requests since `before = requests()`."""
        now: dict[str, int] = self.status()["requests"]
        return {name: now[name] - before.get(name, 0) - self.own_reads.get(name, 0) for name in now}

    def primed(self, files: int, timeout_s: float = COMMAND_S) -> bool:
        """Wait until so many files were pushed into the page cache; False if that does not happen."""
        return until(lambda: self.data()["primed_files"] >= files, timeout_s)

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def rss(self) -> int:
        return rss(self.pid)


class Bed:
    """One benchmark run: a server, to which the environment points, and a directory."""

    def __init__(self, report: Report, plan: Plan, stack: ExitStack) -> None:
        signal.signal(signal.SIGTERM, _end)  # as Ctrl-C does: mounts and servers go
        self.report = report
        self.plan = plan
        self.stack = stack
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="stepfs-bench-read-"))
        self.directory = Path(name).resolve()
        self._number = 0
        report.say("starting SeaweedFS")
        self.server = stack.enter_context(servers.seaweedfs(self.directory / "seaweedfs"))
        forget_variables("AWS_")
        os.environ.update(self.server.environment())

    def fresh(self, name: str) -> Path:
        """A directory of this run that nobody used before."""
        self._number += 1
        path = self.directory / f"{name}-{self._number}"
        path.mkdir()
        return path

    def lake(
        self, name: str, slices: int, batches: Iterator[Sequence[bytes]], *, ext: str = ".bin", url: str = ""
    ) -> str:
        """A new lake of these steps, on the server unless `url` says otherwise; returns its URL."""
        self._number += 1
        url = url or f"s3://{servers.BUCKET}/{name}-{self._number}"
        trio.run(_create, url, slices, ext)
        with Producer(url, producer_id="bench") as producer:
            for number, batch in enumerate(batches):
                producer.append(batch, position=number)
        return url

    @contextmanager
    def mounted(self, url: str, *options: str, environment: dict[str, str] | None = None) -> Iterator[Mount]:
        """`stepfs mount`; detached and gone afterwards."""
        directory = self.fresh("mnt")
        env = os.environ | {"STEPFS_LOG_DIR": str(self.directory / "logs")} | (environment or {})
        began = time.monotonic()
        run([str(BIN / "stepfs"), "mount", url, str(directory), *options], env=env)
        ready_s = time.monotonic() - began
        try:
            config = json.loads((directory / ".stepfs/config.json").read_text())
            status = json.loads((directory / ".stepfs/status.json").read_text())
            yield Mount(directory, config["pid"], ready_s, status["ext"])
        finally:
            let_go(directory)

    def probe(self, **order: object) -> dict[str, Any]:
        """What `bench.probe` measured in a fresh process."""
        command = program("bench.probe", json.dumps(order))
        done = run(["nice", "-n", "-20", *command] if self.plan.urgent else command)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def read_once(self, path: Path) -> float:
        """Seconds that a fresh process takes to read a file, 1 MiB at a time."""
        return float(self.probe(kind="raw", paths={"it": str(path)}, passes=1)["seconds"]["it"][0])

    def speeds(self, what: str, seconds: Mapping[str, Sequence[float]], size: int) -> dict[str, float]:
        """Medians in MB/s, and the raw seconds into the figures."""
        self.report.figures[what] = {side: [round(value, 6) for value in seconds[side]] for side in seconds}
        return {side: size / 1e6 / median(values) for side, values in seconds.items() if values}

    def ratio(self, bound: float, what: str, ours: float, name: str, theirs: float, *, beside: str = "") -> None:
        """A row of two speeds in MB/s."""
        text = f"{name} {theirs:,.0f} MB/s{beside}"
        self.report.add(at_least(bound, what, f"{ours:,.0f} MB/s", text, ours / theirs))


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def data_objects(url: str) -> list[str]:
    """Keys of the data objects of a lake on the server, in order of steps (of one producer)."""
    import boto3  # noqa: PLC0415 - half a second

    prefix = url.partition(f"{servers.BUCKET}/")[2] + "/"
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=servers.BUCKET, Prefix=prefix)
    found = (item["Key"] for page in pages for item in page.get("Contents", ()))
    return sorted(key for key in found if key.endswith(".tgb"))


def body_of(step: int, size: int) -> bytes:
    """The bytes of a slice that is to be recognised."""
    seed = hashlib.sha256(b"%d" % step).digest()
    return seed * (size // len(seed))


async def _create(url: str, slices: int, ext: str) -> None:
    store = open_store(url)
    await create_lake(store, slices=slices, ext=ext)
    await store.aclose()


def encoded(kind: str, size: int, seed: int) -> bytes:
    """About `size` random bytes as a file of a kind: 'raw', 'npy', 'pt', 'safetensors'."""
    import numpy as np  # noqa: PLC0415 - torch and it are needed by few runs

    array = np.random.default_rng(seed).integers(0, 1 << 31, size // 4, dtype=np.int32)
    if kind == "raw":
        return array.tobytes()
    if kind == "npy":
        out = io.BytesIO()
        np.save(out, array)
        return out.getvalue()
    import torch  # noqa: PLC0415

    if kind == "pt":
        from stepfs.torch import dump  # noqa: PLC0415

        return dump({"ids": torch.from_numpy(array)})
    from safetensors.torch import save  # noqa: PLC0415

    return bytes(save({"ids": torch.from_numpy(array)}))
