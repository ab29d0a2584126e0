"""What a torture run writes and how what was seen is noted: payloads that can be told from their bytes, and journals.

A payload is a function of (seed, producer, record, slice), so whoever finds bytes anywhere can say whose they are and
whether every one of them is right. A journal line is one `write` to a file opened for appending: a process killed
with -9 has written it whole or not at all.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLICES = 3
_SIZES = ((100, 4_000), (4_000, 64_000), (200_000, 400_000), (9 << 20, 10 << 20))
_WEIGHTS = (900, 80, 18, 1)  # the last kind takes more than one block, part and GET


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose bytes these are."""

    producer: str
    record: int
    slice: int


def payload(seed: int, origin: Origin) -> bytes:
    draw = random.Random(f"{seed}/{origin.producer}/{origin.record}/{origin.slice}")
    low, high = draw.choices(_SIZES, _WEIGHTS)[0]
    head = json.dumps([origin.producer, origin.record, origin.slice]).encode() + b"\n"
    return head + draw.randbytes(draw.randrange(low, high))


def batch(seed: int, producer: str, record: int) -> list[bytes]:
    """The payloads of one step."""
    return [payload(seed, Origin(producer, record, index)) for index in range(SLICES)]


def recognise(seed: int, data: bytes) -> Origin | None:
    """Whose bytes these are, if every one of them is as its producer wrote it."""
    head, newline, _ = data[:400].partition(b"\n")
    try:
        producer, record, index = json.loads(head)
        origin = Origin(str(producer), int(record), int(index))
    except (ValueError, TypeError):
        return None
    return origin if newline and payload(seed, origin) == data else None


class Journal:
    """Append-only notes of one role, by all its incarnations."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def note(self, **facts: Any) -> None:
        line = json.dumps({"pid": os.getpid(), "at": round(time.time(), 3), **facts}) + "\n"
        written = os.write(self._handle, line.encode())
        assert written == len(line.encode())


def notes(path: Path) -> Iterator[dict[str, Any]]:
    """Everything noted so far, oldest first."""
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)


class Tail:
    """Notes as they come: each call of `new` returns those since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            body = file.read()
        whole = body[: body.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
