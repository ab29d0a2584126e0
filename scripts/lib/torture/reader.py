"""A trainer of a torture run: reads every file of every step through a mount, in order, and saves where it is.

A restart resumes from the newest of the two checkpoints kept, or from the older one, which a real trainer does when the
newest turns out unusable; every step from there on must still be there.

Exit codes: 0 all steps read, 11 the mount went away under it (a supervisor starts it again), 1 after a fault noted
in the journal.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.checkpoints import Checkpoints, Fault, Said, Watched
from torture.records import SLICES, Journal, recognise

MOUNT_LOST = 11
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ESTALE, errno.ESHUTDOWN}
_GLANCE_S = 0.05
_MOUNT_WAIT_S = 120.0
_HURRY = 5  # so many times fewer checkpoints once nothing new comes and nobody is killed any more


@dataclass
class Reader:
    """One incarnation of one group's reading."""

    seed: int
    mount: Path
    journal: Journal
    checkpoints: Checkpoints
    end: Path
    every: int  # steps between checkpoints
    facts: bool  # whether to read what the mount says of each step, too

    def run(self) -> None:
        kept = self.checkpoints.kept
        step = random.choice([*kept[-1:] * 2, *kept[:1]]) if kept else 0
        self._find_mount()
        self.journal.note(resumed=step, kept=kept)
        while (total := self._total()) is None or step < total:
            if not self._committed(step):
                time.sleep(_GLANCE_S)
                continue
            self._read(step)
            step += 1
            if step % (self.every if total is None else self.every * _HURRY) == 0:
                self.checkpoints.make(step)
        while not self.checkpoints.make(step):
            time.sleep(_GLANCE_S)
        self.journal.note(finished=step)

    def _total(self) -> int | None:
        return int(self.end.read_text()) if self.end.exists() else None

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.mount / ".stepfs/status.json").read_text())
        return status

    def _find_mount(self) -> None:
        deadline = time.monotonic() + _MOUNT_WAIT_S
        while time.monotonic() < deadline:
            try:
                self._status()
            except OSError:
                time.sleep(_GLANCE_S)
            else:
                return
        sys.exit(MOUNT_LOST)

    def _directory(self, step: int) -> Path:
        return self.mount / f"step-{step:09d}"

    def _committed(self, step: int) -> bool:
        try:
            before = self._status()
            with os.scandir(self._directory(step)):
                return True
        except FileNotFoundError:
            after = self._status()
            if before["next_step"] > step:
                raise Fault(
                    f"step {step} is committed and needed, but not shown (first {after['first_step']})"
                ) from None
            return False

    def _read(self, step: int) -> None:
        """Every byte of one step, recognised; what was seen goes to the journal."""
        directory = self._directory(step)
        names = sorted(path.name for path in directory.iterdir())
        if names != [f"rank-{rank:05d}.bin" for rank in range(SLICES)]:
            raise Fault(f"step {step} shows {names}")
        digest = hashlib.sha256()
        whose = None
        for rank, name in enumerate(names):
            said = (directory / name).stat()
            data = (directory / name).read_bytes()
            if len(data) != said.st_size:
                raise Fault(f"torn: {name} of step {step} has {said.st_size} bytes, {len(data)} were read")
            found = recognise(self.seed, data)
            if found is None or found.slice != rank or (whose and (found.producer, found.record) != whose):
                raise Fault(f"torn: {name} of step {step} holds {found or data[:60]!r}, not slice {rank} of {whose}")
            whose = (found.producer, found.record)
            digest.update(data)
        assert whose is not None
        seen: dict[str, Any] = {"step": step, "sha": digest.hexdigest()[:32], "whose": whose}
        if self.facts and (facts := self._facts(step)):
            seen |= {"epoch": facts["epoch"], "version": facts["version"], "said": facts["producer"]}
        self.journal.note(**seen)

    def _facts(self, step: int) -> dict[str, Any]:
        """What the mount says of a step; it asks the store for that, so an outage may be in the way."""
        try:
            facts: dict[str, Any] = json.loads((self.mount / f".stepfs/steps/{step}.json").read_text())
        except TimeoutError:
            return {}
        return facts


def exit_code(run: Callable[[], None], journal: Journal) -> int:
    """What a reader ends with. Its faults go to the journal."""
    try:
        run()
    except OSError as error:
        if error.errno in GONE:
            journal.note(mount_lost=errno.errorcode.get(error.errno or 0, "?"))
            return MOUNT_LOST
        journal.note(fault=f"{errno.errorcode.get(error.errno or 0)} {error.filename}")
        return 1
    except Fault as fault:
        journal.note(fault=str(fault))
        return 1
    return 0


def main() -> int:
    order = json.loads(sys.argv[1])
    mount, end = Path(order.pop("mount")), Path(order.pop("end"))
    journal = Journal(Path(order.pop("journal")))
    checkpoints: Checkpoints
    if watched := order.pop("watched", None):
        checkpoints = Watched(Path(watched), journal)
    else:
        checkpoints = Said(Path(order.pop("state")), order.pop("tell"), journal)
    reader = Reader(journal=journal, checkpoints=checkpoints, mount=mount, end=end, **order)
    return exit_code(reader.run, journal)


if __name__ == "__main__":
    sys.exit(main())
