"""A reader of a torture run that keeps to no order: any rank of any step the mount shows, read in one of three ways.

It holds a file open for a while before it reads, so that steps leave the view, memory and the store in between: what was
opened must stay readable as long as its daemon lives. It registers nothing and needs nothing kept.

Exit codes: 0 at the end of the run, 11 the mount went away under it, 1 after a fault noted in the journal. A mapping whose
daemon is killed ends it by SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torture.checkpoints import Fault
from torture.reader import exit_code
from torture.records import Journal, recognise

_NOTE_S = 5.0
_GLANCE_S = 0.05
_HOLD_S = ((0.0, 20), (0.3, 5), (4.0, 1))  # how long a file is open before it is read, with weights
_CHUNKS = (1 << 12, 1 << 16, 1 << 20)


@dataclass
class Sampler:
    """One incarnation."""

    seed: int
    mount: Path
    end: Path
    journal: Journal
    done: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        noted_at = time.monotonic()
        self.journal.note(sampling=True)
        while not self.end.exists():
            path = self._any_file()
            if path is None:
                time.sleep(_GLANCE_S)
            else:
                self._sample(path)
            if time.monotonic() - noted_at > _NOTE_S:
                noted_at = time.monotonic()
                self.journal.note(sampled=dict(self.done))
        self.journal.note(sampled=dict(self.done), finished=True)

    def _any_file(self) -> Path | None:
        try:
            steps = [path for path in self.mount.iterdir() if path.name.startswith("step-")]
            return random.choice(list(random.choice(steps).iterdir()))
        except (FileNotFoundError, IndexError):  # withdrawn meanwhile, or nothing is mounted
            return None

    def _sample(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self.done["withdrawn"] += 1
            return
        try:
            holds, weights = zip(*_HOLD_S, strict=True)
            time.sleep(random.uniform(0, random.choices(holds, weights)[0]))
            how = random.choice((self._whole, self._pieces, self._mapped))
            data = how(descriptor)
            self.done[how.__name__.strip("_")] += 1
        finally:
            os.close(descriptor)
        found = recognise(self.seed, data)
        if found is None or path.name != f"rank-{found.slice:05d}.bin":
            raise Fault(f"torn: {path} holds {found or data[:60]!r} ({len(data)} bytes, read {how.__name__})")

    @staticmethod
    def _whole(descriptor: int) -> bytes:
        chunk = random.choice(_CHUNKS)
        return b"".join(iter(lambda: os.read(descriptor, chunk), b""))

    @staticmethod
    def _pieces(descriptor: int) -> bytes:
        """In no order, as a format with an index reads."""
        size, piece = os.fstat(descriptor).st_size, random.choice(_CHUNKS)
        data = bytearray(size)
        offsets = list(range(0, size, piece))
        random.shuffle(offsets)
        for offset in offsets:
            data[offset : offset + piece] = _exactly(descriptor, min(piece, size - offset), offset)
        return bytes(data)

    @staticmethod
    def _mapped(descriptor: int) -> bytes:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapping:
            return bytes(mapping)


def _exactly(descriptor: int, size: int, offset: int) -> bytes:
    """A daemon that is killed within a read leaves it short; the next one then says that it is gone."""
    found = b""
    while len(found) < size and (more := os.pread(descriptor, size - len(found), offset + len(found))):
        found += more
    return found


def main() -> int:
    order = json.loads(sys.argv[1])
    journal = Journal(Path(order["journal"]))
    return exit_code(Sampler(order["seed"], Path(order["mount"]), Path(order["end"]), journal).run, journal)


if __name__ == "__main__":
    sys.exit(main())
