"""A fresh process that reads many files with a DataLoader, or with plain forked readers; prints JSON.

The order comes as JSON in the only argument: `paths` (a file with one path per line), `workers`, `loader` ('torch' or
'plain'). The clock runs from the moment all workers are up (they wait for each other) until the last byte.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

BATCH = 64
_SIZE_MAX = 1 << 20


def read(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    total = 0
    while data := os.read(descriptor, _SIZE_MAX):
        total += len(data)
    os.close(descriptor)
    return total


def with_torch(paths: list[str], workers: int) -> tuple[float, int]:
    from torch.utils.data import DataLoader, Dataset  # noqa: PLC0415 - seconds

    up = multiprocessing.get_context("fork").Barrier(workers)

    class Files(Dataset[tuple[float, float, int]]):
        """Reads a file; when it began, when it was done, its length."""

        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, number: int) -> tuple[float, float, int]:
            began = time.monotonic()
            size = read(paths[number])
            return began, time.monotonic(), size

    def start_together(_worker: int) -> None:
        up.wait()

    loader = DataLoader(
        Files(),
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=lambda rows: rows,
        worker_init_fn=start_together,
        multiprocessing_context="fork",
    )
    rows = [row for batch in loader for row in batch]
    return max(row[1] for row in rows) - min(row[0] for row in rows), sum(row[2] for row in rows)


def plainly(paths: list[str], workers: int) -> tuple[float, int]:
    context = multiprocessing.get_context("fork")
    up, results = context.Barrier(workers), context.SimpleQueue()

    def work(number: int) -> None:
        up.wait()
        began = time.monotonic()
        size = sum(map(read, paths[number::workers]))
        results.put((began, time.monotonic(), size))

    processes = [context.Process(target=work, args=(number,)) for number in range(workers)]
    for process in processes:
        process.start()
    rows = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return max(row[1] for row in rows) - min(row[0] for row in rows), sum(row[2] for row in rows)


def main() -> None:
    order = json.loads(sys.argv[1])
    paths = Path(order["paths"]).read_text().splitlines()
    how = with_torch if order["loader"] == "torch" else plainly
    seconds, size = how(paths, order["workers"])
    print(json.dumps({"seconds": seconds, "bytes": size, "files": len(paths)}))


if __name__ == "__main__":
    main()
