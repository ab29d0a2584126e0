"""A NATS server with a file store, and what its client measures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import servers

from bench.machine import SCRIPTS, run, until
from bench_ingest.brokers.nats_client import MESSAGE_BYTES
from bench_ingest.brokers.sides import Losses, read_until_killed

_READY_S = 20.0


class Nats:
    """A `Side`. `sync` is the server's `sync_interval`; '' leaves its default, two minutes."""

    note = f"payloads above {MESSAGE_BYTES >> 20} MiB as several messages: the server's bound"

    def __init__(self, name: str, server: Path, python: Path, sync: str) -> None:
        self.name = name
        self.settings = f"sync_interval: {sync}" if sync else "default"
        self._server, self._python, self._sync = server, python, sync
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()
        self._url = ""

    @property
    def version(self) -> str:
        return run([str(self._server), "--version"]).stdout.strip()

    @contextmanager
    def running(self, directory: Path) -> Iterator[None]:
        directory.mkdir()
        self._directory = directory
        port = servers.free_port_of_nobody()
        self._url = f"nats://127.0.0.1:{port}"
        store = f'store_dir: "{directory}/store"' + (f", sync_interval: {self._sync}" if self._sync else "")
        (directory / "nats.conf").write_text(f"listen: 127.0.0.1:{port}\njetstream {{ {store} }}\n")
        self._start()
        try:
            yield
        finally:
            self._kill()

    def rate(self, size: int, count: int) -> float:
        """Bytes per second."""
        return size * count / float(self._ask(do="publish", size=size, count=count)["seconds"])

    def latencies(self, size: int, count: int, gap_s: float) -> list[float]:
        """Seconds from the begin of a publish to the end of its read."""
        found: list[float] = self._ask(do="latency", size=size, count=count, gap_s=gap_s)["latencies"]
        return found

    def losses(self, size: int, count: int) -> Losses:
        acknowledged = read_until_killed(self._client(do="until_killed", size=size), count, self._kill)
        self._start()
        return Losses.of(acknowledged, self._ask(do="audit")["found"])

    def _start(self) -> None:
        log = self._directory / "server.log"
        with log.open("ab") as output:
            command = [str(self._server), "-c", str(self._directory / "nats.conf")]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        before = log.read_text().count("Server is ready")
        if (
            not until(lambda: log.read_text().count("Server is ready") > before or self._ended(), _READY_S)
            or self._ended()
        ):
            raise RuntimeError(f"nats-server does not start: {log.read_text()[-1000:]}")

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _client(self, **order: Any) -> list[str]:
        return [
            str(self._python), "-m", "bench_ingest.brokers.nats_client", json.dumps({"url": self._url} | order),
        ]  # fmt: skip

    def _ask(self, **order: Any) -> dict[str, Any]:
        env = os.environ | {"PYTHONPATH": str(SCRIPTS / "lib")}
        answer: dict[str, Any] = json.loads(run(self._client(**order), env=env).stdout)
        return answer
