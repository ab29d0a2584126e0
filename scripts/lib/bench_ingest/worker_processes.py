"""The producer processes of bench_ingest, and the pipes to them: started once, gone at the end whatever happened.

Each has a session of its own, so Ctrl-C reaches the benchmark alone, which kills them on its way out; if it is killed
itself, they see their pipes end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE
from typing import Any

import trio

ANSWER_S = 90.0
_LINE_BYTES = 1 << 20


class Worker:
    """A producer process and the pipe to it."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._left = b""

    async def tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps(order).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with trio.fail_after(ANSWER_S):
            while b"\n" not in self._left:
                piece = await self.process.stdout.receive_some(_LINE_BYTES)
                if not piece:
                    raise SystemExit("bench_ingest: a producer process ended; its message is above")
                self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[Worker]]:
    """`count` producer processes, each in a session of its own; all are gone afterwards, whatever happened."""
    command = [sys.executable, "-m", "bench_ingest.worker"]
    started: list[Worker] = []
    try:
        for _ in range(count):
            process = await trio.lowlevel.open_process(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
            started.append(Worker(process))
        for worker in started:
            await worker.hear()
        yield started
    finally:
        for worker in started:
            with suppress(ProcessLookupError):
                worker.process.kill()
        with trio.CancelScope(shield=True):
            for worker in started:
                await worker.process.wait()
