"""Reading the plan that a command line names."""

from __future__ import annotations

from pathlib import Path

from stepfs.errors import AbsentError, RefusedError
from stepfs_producer.plan.file.yaml_file import PlanFile, read_plan


def read_plan_file(path: Path) -> PlanFile:
    """The plan in a file. `PlanError` has a line for every mistake; `AbsentError`, `RefusedError` if it cannot be read."""
    try:
        return read_plan(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such file; name the YAML file of a plan") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; name a readable YAML file") from error
