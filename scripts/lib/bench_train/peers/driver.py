"""The process of the training job, equal for all peers: a loop that sleeps for its compute and notes every batch.

    python -m bench_train.peers.driver ORDER

ORDER is the JSON of `job.Order`. Runs in the peer's own environment. The journal gets a line per batch: when it came,
counted from the call that opens the data; how long the loop waited; ids. A state is saved
as a trainer saves one, after the batch that it covers. A process that shall be killed says so and waits for it.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bench_train.peers.catalogue import CATALOGUE
from bench_train.peers.job import Adapter, Order

if TYPE_CHECKING:
    from bench_train.peers.job import Batch, Stream

KILL_ME = "kill me"


def main() -> None:
    order = Order.of(sys.argv[1])
    adapter: Any = importlib.import_module(f"bench_train.peers.adapters.{CATALOGUE[order.peer].module}")
    if order.do == "write":
        adapter.write(order)
        return
    with Path(order.journal).open("w", encoding="utf-8", buffering=1) as journal:
        train(adapter, order, journal)


def train(adapter: Adapter, order: Order, journal: TextIO) -> None:
    adapter.imports()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    note(journal, imported_s=time.monotonic() - process_start(), cpu_s=cpu_s())
    began = time.monotonic()
    saved = pickle.loads(Path(order.state).read_bytes()) if order.resume else None
    stream = adapter.train(order, None if saved is None else saved["state"])
    batches = stream.batches()
    if saved is not None and saved["state"] is None:  # all that can be done without a state: read, and drop
        batches = skipped(batches, saved["batches"])
    stopped = loop(stream, batches, order, journal, began)
    del stream, batches
    gc.collect()  # which ends workers that are still at it, so that their CPU counts
    note(journal, ended=True, stopped=stopped, cpu_s=cpu_s())


def loop(stream: Stream, batches: Iterator[Batch], order: Order, journal: TextIO, began: float) -> bool:
    """Whether it was stopped because it took too long."""
    for number in itertools.count(1):
        asked = time.monotonic()
        found = next(batches, None)
        if found is None:
            return False
        arrived = time.monotonic()
        ids, content = found
        assert len(ids) == len(content) <= order.data.batch, (len(ids), content.shape)
        note(journal, at=arrived - began, wait=arrived - asked, ids=ids.tolist())
        time.sleep(order.compute_s)
        if number == order.save_at:
            save(stream, order, number)
        if number == order.kill_at:
            print(KILL_ME, flush=True)
            time.sleep(600)
        if order.seconds_max and time.monotonic() - began > order.seconds_max:
            break
    return True


def save(stream: Stream, order: Order, number: int) -> None:
    """The state after `number` batches; whole or not at all."""
    body = pickle.dumps({"batches": number, "state": stream.state()})
    path = Path(order.state)
    path.with_suffix(".new").write_bytes(body)
    path.with_suffix(".new").replace(path)


def skipped(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    next(itertools.islice(batches, count, count), None)
    return batches


def note(journal: TextIO, **facts: object) -> None:
    print(json.dumps(facts), file=journal)


def cpu_s() -> float:
    """Of this process and of those children that have ended."""
    return sum(
        found.ru_utime + found.ru_stime
        for found in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def process_start() -> float:
    """When this process started, on the monotonic clock."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic() - (now - ticks / os.sysconf("SC_CLK_TCK"))


if __name__ == "__main__":
    main()
