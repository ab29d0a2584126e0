"""The checkpoints of a torture run's trainer, as the lake comes to know them: said by a command, or seen in a directory.

Both are durable before anybody is told, so whatever the lake believes is kept can be gone back to, and both keep two.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

from torture.records import Journal

_KEPT = 2
_UNREACHABLE = 6


class Fault(Exception):  # noqa: N818 - a finding of the run, not an error of this program
    """Something that must not happen."""


class Checkpoints(ABC):
    """The next steps of the checkpoints that are kept, oldest first."""

    kept: list[int]

    @abstractmethod
    def make(self, next_step: int) -> bool:
        """One more, and the oldest goes; False if the lake could not be told."""


class Said(Checkpoints):
    """A state file plays the checkpoints, `stepfs checkpoint` tells of them."""

    def __init__(self, state: Path, command: list[str], journal: Journal) -> None:
        self.kept = json.loads(state.read_text()) if state.exists() else []
        self._state = state
        self._command = command
        self._journal = journal
        self._said: set[int] = set()  # by this incarnation

    def make(self, next_step: int) -> bool:
        """An older one that is kept, and could not be said when it was made, is said before: once a newer one alone is
        known, nobody holds the steps that resuming at the older one needs.
        """
        if next_step not in self.kept:
            self.kept = [*self.kept, next_step][-_KEPT:]
            _write_durably(self._state, json.dumps(self.kept))
        older = [kept for kept in self.kept if kept < next_step and kept not in self._said]
        return all(self._say(kept) for kept in [*older, next_step])

    def _say(self, next_step: int) -> bool:
        command = [*self._command, str(next_step), "--keep", str(_KEPT), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            self._said.add(next_step)
            self._journal.note(checkpoint=json.loads(done.stdout))
        elif done.returncode == _UNREACHABLE:
            self._journal.note(unreachable=next_step)
        else:
            raise Fault(f"checkpoint {next_step}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.returncode == 0


class Watched(Checkpoints):
    """Directories like those of torch DCP, whose `.metadata` comes last; the mount watches them."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self._directory = directory
        self._journal = journal
        self.kept = sorted(int(path.parent.name) for path in directory.glob("*/.metadata"))

    def make(self, next_step: int) -> bool:
        if next_step not in self.kept:
            self.kept.append(next_step)
            made = self._directory / str(next_step)
            made.mkdir(exist_ok=True)
            _write_durably(made / "__0_0.distcp", "weights")
            _write_durably(made / ".metadata", "complete")
            self._journal.note(checkpoint={"watched": next_step})
        while len(self.kept) > _KEPT:
            shutil.rmtree(self._directory / str(self.kept.pop(0)))
        return True


def _write_durably(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
