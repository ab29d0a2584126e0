"""What `stepfs lineage` prints: a table, records below each other, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from stepfs.cli.columns import printable, table
from stepfs.cli.commands.lineage.spans import Shown, ShownSpan
from stepfs.format.ids import JSON_SCHEMA


def document(shown: Shown) -> str:
    return json.dumps(
        {
            "schema": JSON_SCHEMA,
            "lake": shown.lake,
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


def lines(shown: Shown) -> Iterator[str]:
    plan = "" if shown.plan is None else f", plan {shown.plan}"
    yield printable(f"step {shown.entry.step} by {shown.entry.producer_id}{plan}")
    for name, one in _sources(shown).items():
        epochs = ", ".join(map(str, one["epochs"]))
        yield printable(f"{name}: {one['tokens']} tokens, {one['share']:.2%}, epoch {epochs}")
    yield ""
    header = ["RANK", "MICRO", "START", "TOKENS", "SOURCE", "EPOCH", "FILE", "RECORD", "FIRST"]
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


def no_text_at_all(shown: Shown) -> str | None:
    """Why no record could be shown, where none of them could be."""
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
    ]
