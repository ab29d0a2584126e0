"""Memory of the trainer's node: the highest sum of proportional set sizes over the trainer, its workers and its mount."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 0.5


def pss(pid: int) -> int:
    """Bytes of a process, where a page that n processes share counts an n-th; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


class Peak:
    """The highest sum so far, of bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def see(self, pids: Sequence[int]) -> None:
        self.bytes = max(self.bytes, sum(map(pss, pids)))


@contextmanager
def peak_pss(pids: Callable[[], Sequence[int]]) -> Iterator[Peak]:
    """Looks every half second, as long as the context lasts."""
    peak, over = Peak(), threading.Event()

    def look() -> None:
        while not over.wait(INTERVAL_S):
            peak.see(pids())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield peak
    finally:
        over.set()
        looking.join()
