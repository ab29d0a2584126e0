"""A training program at work; its lines are shown as they come."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from quickstart.programs import in_time, refuse_failure, start
from quickstart.story import Story


class Trainer:
    """`losses` are those in its lines."""

    def __init__(self, story: Story, running: ExitStack, directory: Path, *facts: int) -> None:
        self.losses: list[float] = []
        self.lines: list[str] = []
        self.first_at = self.last_at = 0.0
        self._story = story
        self._process = start(running, ["python", "-m", "quickstart.train", str(directory), *map(str, facts)])
        self._directory = directory
        self._lines = threading.Thread(target=self._show, daemon=True)
        self._lines.start()

    def waits(self) -> bool:
        """Whether it has opened a step that is not committed yet."""
        refuse_failure("the trainer", self._process)
        status = json.loads((self._directory / ".stepfs/status.json").read_text())
        return bool(status["waiting"])

    def finish(self) -> None:
        in_time("the end of the trainer", self._process.wait, self._story.left_s())
        self._lines.join()
        refuse_failure("the trainer", self._process)

    def _show(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if found := re.search(r"loss ([0-9.]+)", line):
                self.last_at = time.monotonic()
                self.first_at = self.first_at or self.last_at
                self.losses.append(float(found[1]))
            self._story.say(f"trainer  {line.rstrip()}")
