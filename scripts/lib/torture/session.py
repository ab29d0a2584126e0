"""What both commands of scripts/torture begin and end with: signals, a directory, and what was found."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.machine import forget_variables, interrupt_once

_SHOWN_MAX = 20


@dataclass
class Session:
    """One run's directory; it stays behind unless the run has `held`."""

    options: argparse.Namespace
    directory: Path
    console: Console
    held: bool = False

    def report(self, figures: dict[str, object], faults: list[str], show: Callable[[dict[str, object]], None]) -> None:
        """Print the figures, as JSON or as `show` does, and the first faults."""
        if self.options.json:
            print(json.dumps(figures, indent=2))
        else:
            show(figures)
        for fault in faults[:_SHOWN_MAX]:
            self.console.print(f"[red]fault:[/red] {fault}", markup=True, soft_wrap=True)


@contextmanager
def session(options: argparse.Namespace, prefix: str, *foreign: str) -> Iterator[Session]:
    """A run in a directory of its own, without variables that begin with `foreign`."""
    interrupt_once()
    found = Session(options, Path(tempfile.mkdtemp(prefix=prefix)), Console(stderr=True, highlight=False))
    try:
        forget_variables(*foreign)
        yield found
    finally:
        if options.keep or not (found.held or sys.exc_info()[0] is KeyboardInterrupt):
            found.console.print(f"all that it has written is kept in {found.directory}")
        else:
            shutil.rmtree(found.directory, ignore_errors=True)
