"""A store as if behind a network: `bench.slow_store` in a process of its own, and what went through it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.machine import program


@dataclass(frozen=True, slots=True)
class SlowedStore:
    """`url` is for clients."""

    url: str
    _process: subprocess.Popen[str]

    def sent_bytes(self) -> int:
        """What clients got from the store so far, heads of messages included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline())["sent_bytes"])


@contextmanager
def slowed(upstream_url: str, bytes_per_s: float, latency_s: float) -> Iterator[SlowedStore]:
    """The store behind a token bucket."""
    port = upstream_url.rpartition(":")[2]
    command = program("bench.slow_store", port, str(bytes_per_s), str(latency_s))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield SlowedStore(process.stdout.readline().strip(), process)
        finally:
            process.stdin.close()
            process.wait(10)
