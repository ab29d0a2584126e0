"""A program that reads a lake through `stepfs.reader`, a slice at a time, and says how long each took.

Its argument is a JSON object: `url`, `rank`, `memory` (bytes), `prefetch` (steps), and `warm`, the ranks of step 0 that
are read first, so that its buffers were touched. Each line on stdin is `cold STEP` or `primed STEP`; the answer is a
line of seconds: of that step, or of the one behind it.
"""

from __future__ import annotations

import json
import sys
import time

from bench.probe import CPU_CACHE_BYTES
from stepfs import Lake
from stepfs.data.announced_orders import ShuffleHint, StridedOrder
from stepfs.format.ids import Step

_WAIT_S = 120


def main() -> None:
    order = json.loads(sys.argv[1])
    others = bytearray(CPU_CACHE_BYTES)
    with Lake(order["url"], ranks=order["rank"], memory=order["memory"], prefetch=order["prefetch"]) as lake:
        for rank in order["warm"]:
            lake[0][rank]
        print("ready", flush=True)
        for line in sys.stdin:
            mode, step = line.split()[0], Step(int(line.split()[1]))
            if mode == "primed":
                prefetch(lake, step, order["rank"])
                lake[step][order["rank"]]  # as in a loop, the memory that a caller gets was in use a moment ago
                step = Step(step + 1)
            others[:] = bytes(CPU_CACHE_BYTES)
            began = time.perf_counter()
            payload = lake[step][order["rank"]]
            print(time.perf_counter() - began, flush=True)
            del payload


def prefetch(lake: Lake, step: Step, rank: int) -> None:
    """Have the slice and the next one fetched ahead, and wait until they are."""
    lake.announce(ShuffleHint(StridedOrder(step, Step(step + 2), turn=step), 0))
    until = time.monotonic() + _WAIT_S
    while not (lake.holds(step, rank) and lake.holds(step + 1, rank)):
        assert time.monotonic() < until, lake.counts()
        time.sleep(0.02)
    time.sleep(0.1)


if __name__ == "__main__":
    main()
