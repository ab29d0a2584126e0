"""What `stepfs-produce find` prints: a line per step and rank, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from stepfs import interruption
from stepfs.cli.columns import printable, table
from stepfs.cli.target import opened_lineage
from stepfs.errors import AbsentError
from stepfs.format.ids import JSON_SCHEMA
from stepfs.store.api import StoreOptions
from stepfs_producer.run.history.find import Asked, Found, Holder, NotHeld, NotSearched, find_record


def find_report(
    lake: str, options: StoreOptions, source: str, file: str, record: int, *, plan_dir: str, as_json: bool
) -> str:
    """`AbsentError` if no step holds the record."""
    asked = Asked(source, file, record, plan_dir)
    found = interruption.run(partial(_found, lake, options, asked))
    if not any(isinstance(one, Holder) for one in found):
        why = [f"epoch {one.epoch} of {one.producer}: {one.why}" for one in found if isinstance(one, NotHeld)][:5]
        why += [one.line() for one in found if isinstance(one, NotSearched)]
        raise AbsentError(
            f"no step that was searched holds record {record} of {file}; {'; '.join(why) or 'the source was not drawn yet'}"
        )
    return _document(lake, asked, found) if as_json else "\n".join(_lines(found))


async def _found(lake: str, options: StoreOptions, asked: Asked) -> Sequence[Found]:
    async with opened_lineage(lake, options) as reader:
        return await find_record(reader.log, reader, asked)


def _document(lake: str, asked: Asked, found: Sequence[Found]) -> str:
    return json.dumps(
        {
            "schema": JSON_SCHEMA,
            "lake": lake,
            "source": asked.source,
            "file": asked.file,
            "record": asked.record,
            "found": [asdict(one) for one in found if isinstance(one, Holder)],
            "missing": [asdict(one) for one in found if isinstance(one, NotHeld)],
            "not_searched": [asdict(one) for one in found if isinstance(one, NotSearched)],
        },
        ensure_ascii=False,
    )


def _lines(found: Sequence[Found]) -> Iterator[str]:
    header = ["EPOCH", "STEP", "RANK", "MICRO", "START", "TOKENS", "FIRST", "PRODUCER"]
    yield from table(
        header,
        [
            [str(getattr(one, name.lower())) for name in header[:-1]] + [printable(one.producer)]
            for one in found
            if isinstance(one, Holder)
        ],
    )
    for one in found:
        if isinstance(one, NotHeld):
            yield printable(f"epoch {one.epoch} of {one.producer}: {one.why}")
        elif isinstance(one, NotSearched):
            yield printable(one.line())
