"""What `stepfs-produce report` does: figures of a plan or a lake, as a page, a JSON document, or both."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import typer

from stepfs._internal import interruption
from stepfs.cli.columns import json_text, printable, size_text, time_text
from stepfs.cli.commands.status import lake_document
from stepfs.cli.failure import announce
from stepfs.cli.target import opened_lineage
from stepfs.lake.fleet import list_nodes
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import StoreOptions
from stepfs_producer.cli.reports import refuse, showing_plan
from stepfs_producer.report.charts import require_library
from stepfs_producer.report.figures import Report
from stepfs_producer.report.from_lake import report_of_lake
from stepfs_producer.report.from_plan import report_of_plan
from stepfs_producer.report.page import check_place, page_of, write
from stepfs_producer.run.check import inspect
from stepfs_producer.run.prepare import LocatedPlan, plan_file_at


def report_plan(path: Path, steps: int, out: Path | None, *, held_out: bool, text: bool, as_json: bool) -> None:
    _look_before(out)
    file = plan_file_at(path)
    place = LocatedPlan(file.plan, str(path.parent), held_out, path)
    found = inspect(file.plan, held_out=held_out, directory=place.directory)
    if found.findings:
        refuse(file, found)
    made = partial(report_of_plan, place, found, steps, text=text and out is not None, say=_say, progress=showing_plan)
    _give(interruption.run(made), out, text=text, as_json=as_json)


def report_lake(
    lake: str,
    options: StoreOptions,
    plan_dir: str,
    capacity: int | None,
    out: Path | None,
    *,
    text: bool,
    as_json: bool,
) -> None:
    _look_before(out)

    async def look() -> Report:
        async with opened_lineage(lake, options) as reader:
            log = reader.log
            await log.control.refresh(lenient=True)
            groups = dict(sorted(log.control.record.holding.items()))
            nodes = await list_nodes(log.store, log.identity, groups)
            status = lake_document(log, groups, nodes)
            free = _free_bytes(log, capacity)
            wanted = text and out is not None
            return await report_of_lake(reader, status, plan_dir, free_bytes=free, text=wanted)

    _give(interruption.run(look), out, text=text, as_json=as_json)


def _look_before(out: Path | None) -> None:
    if out is not None:
        require_library()
        check_place(out)


def _free_bytes(log: LogReader, capacity: int | None) -> int | None:
    if capacity is not None:
        return max(0, capacity - log.live_bytes)
    root = log.store.url.removeprefix("file://")
    try:
        return None if root == log.store.url else shutil.disk_usage(root).free
    except OSError:
        return None


def _give(report: Report, out: Path | None, *, text: bool, as_json: bool) -> None:
    if out is not None:
        page = page_of(report, {"size": size_text, "when": time_text}, text=text)
        write(out, page)
        holds = "it holds training text" if report.rows else "without training text"
        _say(f"{out}: {size_text(len(page.encode()))}, for you alone: {holds}")
    if as_json:
        typer.echo(json_text(report.document()))


def _say(line: str) -> None:
    announce(printable(line))
