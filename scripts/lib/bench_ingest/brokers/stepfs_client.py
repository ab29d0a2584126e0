"""A producer that appends and flushes one payload after the other; prints the number of each that is committed.

python -m bench_ingest.brokers.stepfs_client URL SIZE
"""

from __future__ import annotations

import itertools
import sys

from bench_ingest.brokers.payloads import payload
from stepfs_producer import Producer


def main() -> None:
    url, size = sys.argv[1], int(sys.argv[2])
    with Producer(url, producer_id="bench") as producer:
        for number in itertools.count():
            producer.append([payload(number, size)], position=number)
            producer.flush()
            print(number, flush=True)


if __name__ == "__main__":
    main()
