"""From the pipeline into the producer, until something ends it."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from stepfs_producer.cli.stopping import Stopping
from stepfs_producer.text.steps import TextPosition, TextStep


class Ending(enum.StrEnum):
    """The reason why feeding ended; everything appended until then must be flushed."""

    COMPLETE = "complete"
    LIMIT = "limit"
    STOPPED = "stopped"


class Appender(Protocol):
    """The part of `Producer` that `feed` uses."""

    def append(
        self, batch: Sequence[bytes], *, position: Mapping[str, object], records: Sequence[int]
    ) -> object: ...


def feed(
    steps: Iterator[TextStep],
    producer: Appender,
    start: TextPosition,
    *,
    stopping: Stopping,
    steps_max: int | None = None,
    steps_per_second: float | None = None,
    shown: Callable[[TextPosition], None] = lambda _position: None,
) -> tuple[Ending, TextPosition]:
    """Append step after step. Returns the reason of the end, and the position of the last appended step.

    `steps_max` counts the producer's steps from its first start. A pace is a limit, and lost time is not made up for:
    a back-pressured producer does not burst afterwards.
    """
    position = start
    due = time.monotonic()
    while not stopping.requested:
        if steps_max is not None and position.steps >= steps_max:
            return Ending.LIMIT, position
        step = next(steps, None)
        if step is None:
            return Ending.COMPLETE, position
        if steps_per_second is not None:
            now = time.monotonic()
            if stopping.wait(due - now):
                break
            due = max(due, now) + 1 / steps_per_second
        producer.append(step.payloads, position=step.position.value(), records=step.records)
        position = step.position
        shown(position)
    return Ending.STOPPED, position
