"""The records behind tokens, for `stepfs-produce lineage --text`: read where their files are at hand, and tokenised once more.

A listing compares names, sizes and beginnings, so a file may have changed unnoticed. The tokens say the rest: the text
that is shown is the one that was tokenised, or none is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import StepfsError
from stepfs.format.planned import Listing
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.run.history.kept_plans import require_files
from stepfs_producer.run.prepare import source_specs, tokenizer_spec, transform_spec
from stepfs_producer.sources.listing import Layout, located_files
from stepfs_producer.sources.reading import read_record
from stepfs_producer.sources.record import Kind, Records, SourceSpec, unpacked
from stepfs_producer.transforms.documents import TransformSpec
from stepfs_producer.transforms.records import timed_transform
from stepfs_producer.transforms.tokenizer import pinned

RESTORE: Final = "restore it"
_RECORDS_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class RecordPart:
    """Tokens of a record, as a step holds them."""

    source: str
    epoch: int
    file: int  # number in the listing
    record: int  # its place in the file
    first: int  # token of the record
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NoText:
    """Why the text of a record is not at hand, in a line."""

    why: str


def record_texts(
    plan: Plan, listings: Mapping[str, Listing], parts: Sequence[RecordPart], directory: str
) -> Sequence[str | NoText]:
    """The record of each part, whole: never another text than the one that was tokenised. `directory`: of the plan's file."""
    find_modules_in(directory)
    plan = resolve(plan)
    specs = source_specs(plan, directory=directory)
    tokenizer = tokenizer_spec(plan, directory=directory)
    with suppress(StepfsError):  # each text says so
        tokenizer = pinned(tokenizer)
    sources = {
        name: _Source(
            plan,
            directory,
            specs[name],
            transform_spec(plan, name, tokenizer, directory=directory),
            listings[name],
            {part.file for part in parts if part.source == name},
        )
        for name in plan.sources
        if name in listings
    }
    return [
        sources[part.source].text(part) if part.source in sources else NoText("its source is not in the lake's plan")
        for part in parts
    ]


@dataclass
class _Source:
    """The records of one source."""

    plan: Plan
    directory: str
    spec: SourceSpec
    transform: TransformSpec
    listing: Listing
    files: Collection[int]
    all: Layout | None = None  # where one of them is gone or changed: each is looked for by itself

    def __post_init__(self) -> None:
        with suppress(StepfsError, OSError):
            self.all = self._layout_of(self.files)
        self._read = lru_cache(maxsize=_RECORDS_KEPT)(self._read_at)

    def text(self, part: RecordPart) -> str | NoText:
        try:
            records = self._read(part.file, part.record)
            if records is None:
                return self._changed(part)
            if records.kind is Kind.TOKENS:
                return NoText("its source holds token ids, no text")
            made, _ = timed_transform(self.transform, self.spec.seed, part.epoch, self.spec.name, records)
        except (StepfsError, OSError) as error:
            return NoText(" ".join(str(error).split()))
        ids = made.samples.ids.values[part.first : part.first + len(part.ids)]
        return _shown(records) if np.array_equal(ids, part.ids) else self._changed(part)

    def _changed(self, part: RecordPart) -> NoText:
        name = self.listing.files[part.file].name
        return NoText(
            f"source {self.spec.name}: other tokens come of {name} at {part.record}, so file, tokenizer or transform changed "
            "since; restore them"
        )

    def _layout_of(self, files: Collection[int]) -> Layout:
        return Layout(self.spec, located_files(self.spec, self.listing, files, advice=RESTORE))

    def _read_at(self, file: int, offset: int) -> Records | None:
        if self.all is None:
            require_files(self.plan, self.directory, [self.spec.name])
        layout = self.all or self._layout_of([file])
        found = (read_record(self.spec, layout.fragment(one), offset) for one in layout.holding(file, offset))
        return next((records for records in found if records is not None), None)


def _shown(records: Records) -> str:
    data = records.data.values.tobytes()
    if records.kind is not Kind.FIELDS or data.startswith(b"{"):
        return data.decode()
    return json.dumps(unpacked(data), ensure_ascii=False, default=lambda value: f"{len(value)} bytes")
