"""One producer process of bench_ingest: commands come as JSON lines on stdin, results go as JSON lines to stdout.

A worker lives for the whole benchmark, because sixteen interpreters take longer to start than a measurement lasts.
Per command: enter a producer, say so, wait for the common start, append on a schedule, report. The schedule is open
loop: a batch has its due time whatever became of the ones before it, and latency counts from there, so a side that
falls behind cannot hide it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import trio

from stepfs._internal import entropy
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer
from stepfs_producer.commit.pace import Pacer

SLICES = 4
ALWAYS_S = 60.0  # the bound on delay of a fixed interval: longer than any interval in a sweep
UPLOADS_AT_ONCE = 8


class FixedPacer(Pacer):
    """The same jitter and the same pause after a loss as ours, around an interval that somebody chose."""

    def __init__(self, interval_s: float) -> None:
        super().__init__(delay_max_s=ALWAYS_S, draw=entropy.uniform)
        self._fixed_s = interval_s

    @property
    def interval_s(self) -> float:
        return self._fixed_s


@dataclass(frozen=True, slots=True)
class Order:
    """What one producer does in one slot. `pacing`: 'dac', 'each' (a commit per batch) or seconds between commits."""

    url: str
    name: str
    pacing: str | float
    rate: float  # batches per second of this producer
    slice_bytes: int
    warm_s: float
    measured_s: float
    cool_s: float

    def pacer(self) -> Pacer | None:
        if self.pacing == "dac":
            return None
        return FixedPacer(0.0 if self.pacing == "each" else float(self.pacing))


async def produce(order: Order) -> dict[str, Any]:
    """Due times by seq, and what the attempts of the measured stretch came to."""
    batch = [random.randbytes(order.slice_bytes) for _ in range(SLICES)]
    due: list[float] = []
    tallies: list[dict[str, int]] = []
    producer = AsyncProducer(order.url, producer_id=order.name, pacer=order.pacer())
    async with producer:
        say(ready=True)
        start = json.loads(await trio.to_thread.run_sync(sys.stdin.readline))["go"]
        offset = trio.current_time() - monotonic()
        warm = start + order.warm_s + offset
        over = warm + order.measured_s
        end = over + order.cool_s

        async def tally_at(when: float) -> None:
            await trio.sleep_until(when)
            tallies.append(asdict(producer.tally))

        first_seq = producer.next_seq
        with trio.move_on_at(end):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tally_at, warm)
                nursery.start_soon(tally_at, over)
                await trio.sleep_until(start + offset)
                next_due = trio.current_time() + random.uniform(0, 1 / order.rate)
                while True:
                    await trio.sleep_until(next_due)
                    due.append(next_due - offset)
                    await producer.append(batch, position=len(due))
                    if order.pacing == "each":
                        await producer.flush()
                    next_due += 1 / order.rate
        raise Done(due=due, first_seq=first_seq, tallies=tallies)
    raise AssertionError


class Done(Exception):  # noqa: N818 - leaves `async with` without flushing what is pending; not an error
    """The slot is over."""

    def __init__(self, **found: Any) -> None:
        super().__init__()
        self.found = found


async def put_only(order: Order) -> dict[str, Any]:
    """How many objects of a batch's size this process puts per second: the limit that no pacing can lift."""
    store = open_store(order.url)
    body = random.randbytes(order.slice_bytes * SLICES)
    say(ready=True)
    start = json.loads(await trio.to_thread.run_sync(sys.stdin.readline))["go"]
    await trio.sleep(max(0.0, start - monotonic()))
    count = 0

    async def put(lane: int) -> None:
        nonlocal count
        while True:
            await store.put(f"raw/{order.name}/{lane}-{count}", [body])
            count += 1

    with trio.move_on_after(order.measured_s):
        async with trio.open_nursery() as nursery:
            for lane in range(UPLOADS_AT_ONCE):
                nursery.start_soon(put, lane)
    await store.aclose()
    return {"puts": count}


def monotonic() -> float:
    """Seconds on the clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def say(**found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    say(started=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        try:
            found = trio.run(put_only if order.pacing == "put" else produce, order)
        except Done as done:
            found = done.found
        say(**found)


if __name__ == "__main__":
    main()
