"""A training loop whose computing costs this machine nothing, as on an accelerator: it sleeps. Prints JSON.

The order comes as JSON in the only argument: `paths` (of each step), `period_s` (a step without any wait for data),
`copy_s` (the time to read from the page cache). Every step is read once for training and once more, within the time
for computing, to measure the copy alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def read(paths: list[str], buffer: memoryview) -> int:
    size = 0
    for path in paths:
        with Path(path).open("rb", buffering=0) as file:
            while count := file.readinto(buffer[size:]):
                size += count
    return size


def main() -> None:
    order = json.loads(sys.argv[1])
    buffer = memoryview(bytearray(order["step_bytes"] + 1))
    waits, copies = [], []
    for paths in order["paths"]:
        began = time.monotonic()
        assert read(paths, buffer) == order["step_bytes"]
        arrived = time.monotonic()
        waits.append(arrived - began)
        read(paths, buffer)
        copies.append(time.monotonic() - arrived)
        time.sleep(max(0.0, arrived + order["period_s"] - order["copy_s"] - time.monotonic()))
    print(json.dumps({"waits": waits, "copies": copies}))


if __name__ == "__main__":
    main()
