"""What `stepfs-produce replay` prints: the differences and a line, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import typer

from stepfs import interruption
from stepfs.cli.columns import printable
from stepfs.cli.target import opened_lineage
from stepfs.errors import StepfsError
from stepfs.format.ids import JSON_SCHEMA
from stepfs.store.api import StoreOptions
from stepfs_producer.cli.plans.run_report import say, showing_plan
from stepfs_producer.run.history.replay import Replay, ReplayOptions, replay

_LINES_MAX: Final = 20


def replay_and_report(options: ReplayOptions, store_options: StoreOptions, *, as_json: bool) -> int:
    """The exit code."""
    done = interruption.run(_replayed, options, store_options)
    for line in _trouble(done):
        say(line)
    typer.echo(json.dumps(_document(done), ensure_ascii=False) if as_json else _line(done))
    return StepfsError.exit_code if done.found.different else 0


async def _replayed(options: ReplayOptions, store_options: StoreOptions) -> Replay:
    async with opened_lineage(options.lake, store_options) as reader:
        return await replay(options, reader, progress=showing_plan)


def _document(done: Replay) -> dict[str, Any]:
    options = done.options
    return {
        "schema": JSON_SCHEMA,
        "lake": options.lake,
        "lake_id": done.lake_id,
        "producer": done.producer_id,
        "plans": done.plans,
        "first_step": options.steps.start,
        "next_step": options.steps.stop,
        "ranks": None if options.ranks is None else list(options.ranks),
        "to": None if options.to is None else str(options.to),
        "steps": done.found.steps,
        "different": sorted(done.found.different),
        "differences": [asdict(one) for one in done.found.shown],
        "libraries": [asdict(one) for one in done.libraries],
        "seconds": round(done.seconds, 3),
    }


def _trouble(done: Replay) -> Iterator[str]:
    for one in done.found.shown[:_LINES_MAX]:
        where = "" if one.slice is None else f", rank {one.rank} (slice {one.slice})"
        yield f"step {one.step}{where}: {one.what}"
    if done.found.different:
        for change in done.libraries:
            yield f"then {change.library} {change.then or 'not installed'}, now {change.now or 'not installed'}"


def _line(done: Replay) -> str:
    found, options = done.found, done.options
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    what = f"{steps} of {printable(done.producer_id)} made again in {done.seconds:.1f} s"
    if options.to is None:
        return f"{what}: " + (f"{len(found.different)} differ" if found.different else "all the same")
    files = "1 file" if found.files == 1 else f"{found.files} files"
    missing = f"; {len(found.different)} could not be made" if found.different else ""
    return f"{what}: {files} written to {printable(str(options.to))}, nothing compared with the lake{missing}"
