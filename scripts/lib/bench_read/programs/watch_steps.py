"""Waits for steps on a mount as a poller does, reads each whole when it appears, prints when that was done.

python -m bench_read.programs.watch_steps DIR FIRST COUNT      prints "ready", then one time (monotonic seconds) per step
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

PAUSE_S = 0.001


def main() -> None:
    directory, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)
    for step in range(first, first + count):
        path = directory / f"step-{step:09d}" / "rank-00000.bin"
        while True:
            try:
                assert path.read_bytes()
                break
            except FileNotFoundError:
                time.sleep(PAUSE_S)
        print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
