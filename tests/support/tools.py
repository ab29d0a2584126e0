"""The tools of `scripts/lib` as tests start them: with the path that their wrappers in `scripts/` set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import finished

ROOT = Path(__file__).resolve().parents[2]
_PATH = (ROOT / "scripts/lib", ROOT / "tests/support", ROOT / "tests/simulator")  # as in scripts/lib/run


def command(tool: str, *arguments: str) -> list[str]:
    """`scripts/TOOL`, without the set-up that it begins with."""
    return [sys.executable, "-m", tool, *arguments]


def environment(**more: str) -> dict[str, str]:
    """The environment in which a tool, and every program that it starts, finds its packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _PATH)), **more}


def ran(tool: str, *arguments: str, timeout: float | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """How it ended. The test's own time is the bound unless one is given."""
    return finished.ran(command(tool, *arguments), env=environment(**more), timeout=timeout)
