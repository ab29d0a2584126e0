"""What a process loads before its first task. Workers import this module, so nothing here may need trio."""

from __future__ import annotations

import sys
from pathlib import Path


def preload(directory: str) -> None:
    """In a new worker: import what tasks need, and find the user's modules beside the plan."""
    import stepfs_producer.roles.constructor  # noqa: PLC0415
    import stepfs_producer.roles.loader  # noqa: F401, PLC0415

    find_modules_in(directory)


def find_modules_in(directory: str) -> None:
    """Let `module:function` name modules in this directory; installed ones go first."""
    path = str(Path(directory or ".").resolve())
    if path not in sys.path:
        sys.path.append(path)
