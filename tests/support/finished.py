"""Programs that a test runs to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 100.0  # less than a test may take, so that what hangs is named


def ran(
    words: Sequence[str | Path], *, check: bool = False, timeout: float | None = PATIENCE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """How it ended and what it printed, as text."""
    return subprocess.run(words, capture_output=True, text=True, check=check, timeout=timeout, **options)
