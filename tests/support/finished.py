"""Programs that a test runs to their end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 100.0  # less than a test may take, so that what hangs is named

# A command that is at work for ten seconds says how far it is; on a busy machine any one may be.
_PROGRESS = re.compile(r"stepfs(-produce)?: [\w-]+( into)? \S+: (nothing yet after |\d+( of \d+)? \w+, ).*\n?")


def ran(
    words: Sequence[str | Path], *, check: bool = False, timeout: float | None = PATIENCE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """How it ended and what it printed, as text, but for lines of progress."""
    done = subprocess.run(words, capture_output=True, text=True, check=check, timeout=timeout, **options)
    done.stderr = without_progress(done.stderr)
    return done


def without_progress(said: str) -> str:
    return "".join(line for line in said.splitlines(keepends=True) if not _PROGRESS.fullmatch(line))
