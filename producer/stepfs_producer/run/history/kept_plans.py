"""The plans that a lake keeps, and whether their files are here.

Names of files are relative to the plan's directory, which the lake does not know.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection
from pathlib import PurePosixPath

from stepfs.errors import AbsentError
from stepfs.lake.kept_plans import kept_plan
from stepfs.lake.log.reader import LogReader
from stepfs_producer.plan.file.digest import plan_of_text
from stepfs_producer.plan.model import Plan
from stepfs_producer.run.prepare import source_specs, tokenizer_spec
from stepfs_producer.sources.formats import format_of


async def plan_of(log: LogReader, digest: str) -> Plan | None:
    """The plan of a digest, as the lake keeps it; None if its object is gone."""
    text = await kept_plan(log.store, log.identity.lake_id, digest)
    return None if text is None else plan_of_text(text)


def require_files(plan: Plan, directory: str, sources: Collection[str]) -> None:
    """`AbsentError` names the first entry of these sources, or tokenizer, that `directory` does not have."""
    tokenizer = tokenizer_spec(plan).file
    if tokenizer is not None:
        _require("the tokenizer", tokenizer, tokenizer, directory)
    for source, spec in source_specs(plan).items():
        for name in spec.source.files if source in sources else ():
            for entry in format_of(spec).entries((name,)):
                _require(f"source {source}", name, entry, directory)


def _require(what: str, name: str, entry: str, directory: str) -> None:
    path = str(PurePosixPath(directory) / entry)
    if "://" in entry or entry.startswith("/") or os.path.lexists(path):
        return
    if next(glob.iglob(path, recursive=True), None) is None:  # noqa: PTH207  (as `find_files` reads entries)
        raise AbsentError(
            f"{what}: {name}: no such file in {os.path.abspath(directory)}; restore it, or name the directory that the "  # noqa: PTH100
            "plan's file was in by --plan-dir"
        )
