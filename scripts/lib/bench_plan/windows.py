"""A rank's DataLoader as it is without us: every worker keeps a shuffle window of every source.

    python -m bench_plan.windows FILES WINDOW_BYTES WORKERS

Prints a line once every window was full and used, and ends with its standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from pyarrow.parquet import ParquetFile
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SAMPLES = 30  # of each source and worker, before memory is measured


class Windows(IterableDataset[bytes]):
    """Sources in turn, each in the order of its shuffle window."""

    def __init__(self, paths: list[Path], window_bytes: int) -> None:
        super().__init__()
        self._paths = paths
        self._window_bytes = window_bytes

    def __iter__(self) -> Iterator[bytes]:
        worker = get_worker_info()
        seed = 0 if worker is None else worker.id
        sources = [self._window(path, Random(seed)) for path in self._paths]
        while True:
            for source in sources:
                yield next(source)

    def _window(self, path: Path, random: Random) -> Iterator[bytes]:
        records = self._records(path)
        window: list[bytes] = []
        held = 0
        while True:
            while held < self._window_bytes:
                window.append(next(records))
                held += len(window[-1])
            at = random.randrange(len(window))
            window[at], window[-1] = window[-1], window[at]
            held -= len(window[-1])
            yield window.pop()

    def _records(self, path: Path) -> Iterator[bytes]:
        while True:
            with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as parquet:
                for batch in parquet.iter_batches(batch_size=256, columns=["text"], use_threads=False):
                    for text in batch.column(0).to_pylist():
                        yield text.encode()


def main(directory: str, window_bytes: str, workers: str) -> None:
    paths = sorted(Path(directory).glob("*.parquet"))
    loader = DataLoader(Windows(paths, int(window_bytes)), batch_size=None, num_workers=int(workers))
    samples = iter(loader)
    for _ in range(SAMPLES * len(paths) * int(workers)):
        next(samples)
    print("full", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
