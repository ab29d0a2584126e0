"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.declared_option import Opt

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan: a YAML file.")]
Holdout = Annotated[
    bool, Opt("--holdout", "Take the records that the plan holds out; a run needs a lake of their own.")
]
Workers = Annotated[
    int | None, Opt("--workers", "Processes that read and tokenise; one per core by default.", "N", least=1)
]
