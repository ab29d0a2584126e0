"""Where the steps of a replay go: compared with those of the lake, or written as files of a mount.

Checksums decide. Only where they differ is the lake's slice read, to say in what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import trio

from stepfs.errors import RefusedError, StepfsError
from stepfs.format.ids import SliceIndex
from stepfs.format.payload.excerpt import UnreadablePayloadError
from stepfs.format.payload.spans import COLUMNS, Spans, read_spans
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import checksum_slice
from stepfs.lake.lineage import LineageReader
from stepfs.view.file_names import names_of
from stepfs.view.names import step_name
from stepfs_producer.plan.state import State

_SHOWN_MAX: Final = 100  # differences in words; all are counted

Placed = Mapping[int, "Expected"]  # by the plan's own number of a step


@dataclass(frozen=True, slots=True)
class Expected:
    """A step of the lake, and the state behind it if a commit ends there."""

    entry: StepEntry
    behind: State | None


@dataclass(frozen=True, slots=True)
class Difference:
    """`slice` None: the position behind the step, or the step as a whole."""

    step: int
    slice: int | None
    rank: int | None
    what: str


@dataclass(slots=True)
class Comparison:
    """The steps that were compared, or written, so far."""

    steps: int = 0
    files: int = 0  # written
    different: set[int] = field(default_factory=set)
    shown: list[Difference] = field(default_factory=list)

    def differ(self, difference: Difference) -> None:
        self.different.add(difference.step)
        if len(self.shown) < _SHOWN_MAX:
            self.shown.append(difference)


@dataclass(frozen=True, slots=True)
class ComparingSink:
    """Compares where a producer would append."""

    placed: Placed
    slices: Sequence[int]
    found: Comparison
    identity: LakeIdentity
    reader: LineageReader

    async def append(self, batch: Sequence[bytes], *, position: Mapping[str, object], records: Sequence[int]) -> None:
        """Compare one step; none that was not asked for."""
        expected = self.placed.get(_step_of(position))
        if expected is None:
            return
        entry, grid = expected.entry, self.identity.grid
        self.found.steps += 1
        refs = [entry.tgb.slice(SliceIndex(index)) for index in self.slices]
        made = await trio.to_thread.run_sync(_checksums, batch)
        for index, payload, count, crc, ref in zip(self.slices, batch, records, made, refs, strict=True):
            if (len(payload), crc, count) != (ref.length, ref.crc32c, ref.records):
                rank = index // (grid.slices // grid.ranks)
                what = await self._in_words(entry, SliceIndex(index), payload)
                self.found.differ(Difference(entry.step, index, rank, what))
        if expected.behind is not None and expected.behind.position() != position:
            what = "the position behind it is another one, so the steps after it begin elsewhere"
            self.found.differ(Difference(entry.step, None, None, what))

    async def flush(self) -> None:
        """Nothing is held back."""

    async def _in_words(self, entry: StepEntry, index: SliceIndex, payload: bytes) -> str:
        if len(self.found.shown) >= _SHOWN_MAX:
            return ""
        try:
            theirs: list[Spans] = []
            await self.reader.spans(entry, [index], lambda _, spans: theirs.append(spans))
            mine = await trio.to_thread.run_sync(read_spans, self.identity.ext, payload, self.reader.by_torch)
        except (StepfsError, UnreadablePayloadError) as error:
            return f"other bytes ({error})"
        return _difference(mine, *theirs)


@dataclass(frozen=True, slots=True)
class WritingSink:
    """Writes the steps below a directory, under the names of a mount."""

    placed: Placed
    slices: Sequence[int]
    found: Comparison
    identity: LakeIdentity
    directory: Path

    async def append(self, batch: Sequence[bytes], *, position: Mapping[str, object], records: Sequence[int]) -> None:
        """Write one step; none that was not asked for. `RefusedError` if it is there, or cannot be written."""
        del records
        expected = self.placed.get(_step_of(position))
        if expected is not None:
            await trio.to_thread.run_sync(self._write, expected.entry, batch)
            self.found.steps += 1
            self.found.files += len(batch)

    async def flush(self) -> None:
        """Nothing is held back."""

    def _write(self, entry: StepEntry, batch: Sequence[bytes]) -> None:
        directory, names = self.directory / step_name(entry.step).decode(), names_of(self.identity)
        try:
            directory.mkdir(parents=True)
            for index, payload in zip(self.slices, batch, strict=True):
                (directory / names.name_of(SliceIndex(index)).decode()).write_bytes(payload)
        except OSError as error:
            raise RefusedError(f"--to {directory}: {error.strerror}; name an empty directory with room") from error


def _step_of(position: Mapping[str, object]) -> int:
    behind = position["step"]
    assert isinstance(behind, int)
    return behind - 1


def _checksums(batch: Sequence[bytes]) -> list[int]:
    return [checksum_slice(memoryview(payload))[0] for payload in batch]


def _difference(mine: Spans, theirs: Spans) -> str:
    """The first difference of two payloads, in words."""
    if mine.sources != theirs.sources:
        return f"sources {', '.join(mine.sources)}, in the lake {', '.join(theirs.sources)}"
    rows = min(len(mine.table), len(theirs.table))
    other = np.flatnonzero((mine.table[:rows] != theirs.table[:rows]).any(axis=1))
    row = int(other[0]) if len(other) else rows
    if row < max(len(mine.table), len(theirs.table)):
        return f"span {row} is {_span(mine, row)}, in the lake {_span(theirs, row)}"
    for span in range(rows):
        ids, others = mine.ids_of(span), theirs.ids_of(span)
        if (at := np.flatnonzero(ids != others)).size:
            token = int(at[0])
            return f"token {token} of {_span(mine, span)} is {ids[token]}, in the lake {others[token]}"
    return "the same spans and tokens, other bytes"


def _span(spans: Spans, row: int) -> str:
    if row >= len(spans.table):
        return "none"
    found = dict(zip(COLUMNS, spans.table[row].tolist(), strict=True))
    return (
        "source {name}, file #{file}, record {offset}, from its token {first} on (micro-batch {micro}, place {start}, "
        "{tokens} tokens, epoch {epoch})"
    ).format(name=spans.sources[found["source"]], **found)
