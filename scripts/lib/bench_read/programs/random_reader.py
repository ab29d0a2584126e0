"""One reader of small samples in a given order, with threads: from files, or by ranged GETs of the same bytes.

Reads one JSON order from stdin: {"threads", "paths"} or {"threads", "ranges": [[key, offset, size], …], "bucket",
"endpoint_url"}. Prints {"seconds", "cpu_s", "bytes"}.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    order = json.load(sys.stdin)
    read, samples = (_from_files, order["paths"]) if "paths" in order else (_from_store(order), order["ranges"])
    threads = int(order["threads"])
    lock, queue, total = threading.Lock(), iter(samples), [0] * threads

    def take() -> Iterator[Any]:
        while True:
            with lock:
                sample = next(queue, None)
            if sample is None:
                return
            yield sample

    def work(number: int) -> None:
        for sample in take():
            total[number] += read(sample)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    print(json.dumps({"seconds": took, "cpu_s": time.process_time(), "bytes": sum(total)}))


def _from_files(path: str) -> int:
    return len(Path(path).read_bytes())


def _from_store(order: dict[str, Any]) -> Callable[[Any], int]:
    import boto3  # noqa: PLC0415 - half a second, which the other side does not need
    from botocore.config import Config  # noqa: PLC0415

    config = Config(max_pool_connections=int(order["threads"]), response_checksum_validation="when_required")
    client = boto3.client("s3", endpoint_url=order["endpoint_url"], config=config)
    client.head_bucket(Bucket=order["bucket"])  # the connection, and the client's first requests

    def read(sample: tuple[str, int, int]) -> int:
        key, offset, size = sample
        wanted = f"bytes={offset}-{offset + size - 1}"
        return len(client.get_object(Bucket=order["bucket"], Key=key, Range=wanted)["Body"].read())

    return read


if __name__ == "__main__":
    main()
