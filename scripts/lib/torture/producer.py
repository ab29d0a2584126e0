"""A producer of a torture run: the plain `Producer` loop of the README, with records that can be recognised.

It notes where it started, and what it was told is committed: that much must be found in the end, whatever happens.
Ends with the exit code of the error that stopped it; with 0 once the file `stop` appears.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from stepfs.errors import StepfsError
from stepfs_producer import Producer
from torture.records import Journal, batch


def produce(order: dict[str, object]) -> None:
    name, seed = str(order["name"]), int(str(order["seed"]))
    journal = Journal(Path(str(order["journal"])))
    stop = Path(str(order["stop"]))
    pace_s = 1 / float(str(order["rate"]))
    draw = random.Random()
    with Producer(str(order["lake"]), producer_id=name, max_delay=2.0) as producer:
        position = producer.position
        record = position["next"] if isinstance(position, dict) else 0
        journal.note(started=record, epoch=producer.epoch)
        if producer.next_seq != record:
            journal.note(fault=f"position says record {record}, the log says seq {producer.next_seq}")
        flush_at = record + draw.randrange(1, 12)
        due = time.monotonic()
        while not stop.exists():
            producer.append(batch(seed, name, record), position={"next": record + 1})
            record += 1
            if record >= flush_at:
                producer.flush()
                journal.note(committed=record, tally=vars_of(producer))
                flush_at = record + draw.randrange(1, 30)
            due = max(due + draw.uniform(0, 2 * pace_s), time.monotonic() - 2)
            time.sleep(max(0.0, due - time.monotonic()))
        producer.flush()
        journal.note(committed=record, finished=True, tally=vars_of(producer))


def vars_of(producer: Producer) -> dict[str, int]:
    tally = producer.tally
    return {"attempts": tally.attempts, "lost": tally.lost, "undecided": tally.undecided}


if __name__ == "__main__":
    try:
        produce(json.loads(sys.argv[1]))
    except StepfsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
