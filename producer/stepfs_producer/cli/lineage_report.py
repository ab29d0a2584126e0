"""What `stepfs-produce lineage` prints: a table, records below each other, or a JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepfs._internal import interruption
from stepfs._internal.control_files import answer_within
from stepfs.cli.columns import printable, table
from stepfs.cli.failure import announce
from stepfs.cli.target import lake_of, opened_lineage
from stepfs.errors import AbsentError, StepfsError, UsageError, command
from stepfs.format.ids import JSON_SCHEMA
from stepfs.store.api import StoreOptions
from stepfs.view.inodes import SliceFile, StepDirectory, node_of
from stepfs_producer.run.history.lineage import Shown, ShownSpan, Wanted, shown_spans


@dataclass(frozen=True, slots=True)
class LineageQuery:
    """The wanted spans, and the lake that they are in."""

    lake: str
    options: StoreOptions
    wanted: Wanted


def place_of(path: str, options: StoreOptions, micro: int | None, token: int | None) -> LineageQuery:
    """The spans of a step or a file of a mount, which its inode identifies under any name."""
    full = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow `latest` of a mount that hangs)
    status = answer_within(full.stat)
    if isinstance(status, (FileNotFoundError, NotADirectoryError)):
        raise AbsentError(f"{path}: no such file; name a step or a file of a mount, or LAKE --step N --rank R")
    if isinstance(status, OSError):
        raise StepfsError(f"{path}: {status.strerror}; name a readable file")
    node = None if status is None else node_of(status.st_ino)
    root = full.parent if isinstance(node, StepDirectory) else full.parent.parent
    try:
        lake, options = lake_of(str(root), options)
    except UsageError:
        raise UsageError(
            f"{path} is no step or file of a mount; name one, or the lake: LAKE --step N --rank R"
        ) from None
    if isinstance(node, SliceFile):
        return LineageQuery(lake, options, Wanted(node.step, None, micro, token, node.index))
    if not isinstance(node, StepDirectory):
        raise UsageError(f"{path} is no file of a step; name one, such as step-000000042/rank-00003.pt")
    if micro is not None:
        raise UsageError(f"{path} is a step of several ranks; name a file of it for a micro-batch or a token")
    return LineageQuery(lake, options, Wanted(node.step))


def lineage_report(asked: LineageQuery, texts_below: str | None, *, as_json: bool) -> tuple[str, str | None]:
    """The text, and why no record could be shown, where none of them could be."""
    shown = interruption.run(_shown, asked, texts_below)
    return _document(asked.lake, shown) if as_json else "\n".join(_lines(asked.lake, shown)), _no_text_at_all(shown)


async def _shown(asked: LineageQuery, texts_below: str | None) -> Shown:
    async with opened_lineage(asked.lake, asked.options) as reader:
        return await shown_spans(reader, asked.wanted, texts_below, announce)


def _document(lake: str, shown: Shown) -> str:
    return json.dumps(
        {
            "schema": JSON_SCHEMA,
            "lake": lake,
            "lake_id": shown.lake_id,
            "step": shown.entry.step,
            "producer": shown.entry.producer_id,
            "plan": shown.plan,
            "tokens": sum(span.tokens for span in shown.spans),
            "sources": _sources(shown),
            "spans": [asdict(span) for span in shown.spans],
        },
        indent=2,
        ensure_ascii=False,
    )


def _sources(shown: Shown) -> dict[str, Any]:
    total = sum(span.tokens for span in shown.spans)
    found: dict[str, Any] = {}
    for name in sorted({span.source for span in shown.spans}):
        mine = [span for span in shown.spans if span.source == name]
        tokens = sum(span.tokens for span in mine)
        epochs = sorted({span.epoch for span in mine})
        found[name] = {"tokens": tokens, "share": round(tokens / total, 6), "epochs": epochs}
    return found


def _lines(lake: str, shown: Shown) -> Iterator[str]:
    plan = "" if shown.plan is None else f", plan {shown.plan}"
    yield printable(f"step {shown.entry.step} by {shown.entry.producer_id}{plan}")
    for name, one in _sources(shown).items():
        epochs = ", ".join(map(str, one["epochs"]))
        yield printable(f"{name}: {one['tokens']} tokens, {one['share']:.2%}, epoch {epochs}")
    yield ""
    tags = ["TAG"] if any(span.tag is not None for span in shown.spans) else []
    header = ["RANK", "MICRO", "START", "TOKENS", "SOURCE", "EPOCH", "FILE", "RECORD", "FIRST", *tags]
    if not shown.with_text:
        yield from table(header, [_cells(span) for span in shown.spans])
        return
    for span in shown.spans:
        yield from table(header, [_cells(span)])
        if span.text is None:
            yield f"    no text: {printable(span.problem or '')}"
        else:
            yield from (f"    {printable(line)}" for line in span.text.splitlines())
        yield ""
    ranks = [] if not shown.spans else ["--rank", str(shown.spans[0].rank)]
    asked = command("stepfs-produce", "view", lake, "--step", str(shown.entry.step), *ranks)
    yield printable(f"as tokens, with what is learned: {asked}")


def _no_text_at_all(shown: Shown) -> str | None:
    if not shown.spans or any(span.text is not None for span in shown.spans):
        return None
    whose = "the record" if len(shown.spans) == 1 else f"any of the {len(shown.spans)} spans"
    return f"--text: the text of {whose} is not at hand: {shown.spans[0].problem}"


def _cells(span: ShownSpan) -> list[str]:
    numbers = [span.rank, span.micro, span.start, span.tokens]
    file = f"#{span.file_number}" if span.file is None else printable(span.file)
    return [
        *map(str, numbers),
        printable(span.source),
        str(span.epoch),
        file,
        str(span.record),
        str(span.first),
        *([] if span.tag is None else [printable(span.tag)]),
    ]
