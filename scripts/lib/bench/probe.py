"""One fresh reader process: reads files one way, several times each, and prints how long every pass took as JSON.

The order comes as JSON in the only argument: `kind`, `paths` (side → path, read in this order) and `passes`; or, for
kind 'boto3' and 'http', `bucket`, `keys`, `bytes`, `threads` and, for boto3, `endpoint_url`. Modules, buffers and
connections are made before the clock starts.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

READ_BYTES = 1 << 20
PART_BYTES = 8 << 20
PAGE_BYTES = 4096
CPU_CACHE_BYTES = 256 << 20  # more than any level has

Read = Callable[[str], int]


def plain() -> Read:
    """1 MiB reads into one buffer."""
    buffer = bytearray(READ_BYTES)
    buffer[:] = bytes(len(buffer))

    def read(path: str) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        total = 0
        while count := os.readv(descriptor, [buffer]):
            total += count
        os.close(descriptor)
        return total

    return read


def np_load() -> Read:
    import numpy as np  # noqa: PLC0415 - a probe imports what it uses

    return lambda path: int(np.load(path).nbytes)


def torch_load() -> Read:
    import torch  # noqa: PLC0415

    return lambda path: int(torch.load(path)["ids"].nbytes)


def safetensors() -> Read:
    from safetensors.torch import load_file  # noqa: PLC0415

    def read(path: str) -> int:
        tensor = load_file(path)["ids"]
        tensor[:: PAGE_BYTES // 4].sum()
        return int(tensor.nbytes)

    return read


def memmap() -> Read:
    import numpy as np  # noqa: PLC0415

    def read(path: str) -> int:
        array = np.load(path, mmap_mode="r")
        array[:: PAGE_BYTES // 4].sum()
        return int(array.nbytes)

    return read


READERS = {
    "raw": plain, "np.load": np_load, "torch.load": torch_load, "safetensors": safetensors, "memmap": memmap,
}  # fmt: skip
KINDS = {"raw": "raw", "np.load": "npy", "torch.load": "pt", "safetensors": "safetensors", "memmap": "npy"}


def files(order: dict[str, object]) -> dict[str, object]:
    from bench.bed import encoded  # noqa: PLC0415
    from stepfs.data.page_cache import resident_bytes  # noqa: PLC0415

    kind, paths = str(order["kind"]), dict(order["paths"])  # type: ignore[call-overload]
    read = READERS[kind]()
    with tempfile.NamedTemporaryFile() as sample:  # what is imported late, and memory that is touched first
        Path(sample.name).write_bytes(encoded(KINDS[kind], Path(next(iter(paths.values()))).stat().st_size, 0))
        read(sample.name)
    others = bytearray(CPU_CACHE_BYTES)
    found: dict[str, object] = {}
    seconds: dict[str, list[float]] = {side: [] for side in paths}
    cpu: dict[str, list[float]] = {side: [] for side in paths}
    for side, path in paths.items():
        for number in range(int(str(order.get("passes", 2)))):
            # Or the side that was touched last would come from the CPU's cache.
            others[:] = bytes(CPU_CACHE_BYTES)
            if not number and side in order.get("resident", ()):  # type: ignore[operator]
                found[f"resident {side}"] = resident_bytes(Path(path), Path(path).stat().st_size)
            began, used = time.perf_counter(), time.process_time()
            count = read(path)
            seconds[side].append(time.perf_counter() - began)
            cpu[side].append(time.process_time() - used)
            assert count >= Path(path).stat().st_size * 0.99 - PAGE_BYTES, f"{path}: {count} bytes"
    return found | {"seconds": seconds, "cpu": cpu}


def boto3(order: dict[str, object]) -> dict[str, object]:
    """Ranged GETs of 8 MiB by several threads into memory that was touched before."""
    import boto3 as sdk  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    threads = int(str(order["threads"]))
    config = Config(max_pool_connections=threads, s3={"addressing_style": "path"})
    endpoint = str(order["endpoint_url"]) if "endpoint_url" in order else None
    client = sdk.client("s3", endpoint_url=endpoint, config=config)
    bucket, size = str(order["bucket"]), int(str(order["bytes"]))
    buffer = memoryview(bytearray(b"\1" * size))

    def part(key: str, start: int, stop: int) -> None:
        body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}")["Body"]
        while start < stop and (count := body.readinto(buffer[start:stop])):  # type: ignore[arg-type]
            start += count
        assert start == stop

    return _parts(part, order, threads, size)


def bare_http(order: dict[str, object]) -> dict[str, object]:
    """The same without an SDK: signed URLs, one connection per thread."""
    import boto3 as sdk  # noqa: PLC0415

    threads, size = int(str(order["threads"])), int(str(order["bytes"]))
    client = sdk.client("s3")
    urls = {
        key: urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": order["bucket"], "Key": key}))
        for key in order["keys"]  # type: ignore[attr-defined]
    }
    buffer = memoryview(bytearray(b"\1" * size))
    idle: list[http.client.HTTPConnection] = []

    def part(key: str, start: int, stop: int) -> None:
        url = urls[key]
        connection = idle.pop() if idle else http.client.HTTPConnection(url.netloc)
        connection.request("GET", f"{url.path}?{url.query}", headers={"Range": f"bytes={start}-{stop - 1}"})
        answer = connection.getresponse()
        assert answer.status == 206
        while start < stop and (count := answer.readinto(buffer[start:stop])):
            start += count
        answer.read()
        idle.append(connection)

    return _parts(part, order, threads, size)


def _parts(
    part: Callable[[str, int, int], None], order: dict[str, object], threads: int, size: int
) -> dict[str, object]:
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        keys = list(order["keys"])  # type: ignore[call-overload]
        list(pool.map(lambda _: part(keys[0], 0, 1), range(threads)))  # connections
        for key in keys:
            began = time.perf_counter()
            starts = range(0, size, PART_BYTES)
            list(pool.map(lambda start, key=key: part(key, start, min(start + PART_BYTES, size)), starts))
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    measure = {"boto3": boto3, "http": bare_http}.get(wanted["kind"], files)
    print(json.dumps(measure(wanted)))
