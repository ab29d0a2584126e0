"""A producer of steps that are in the lake already: they are compared with those, or written as files of a mount.

Checksums decide. Only where they differ is the lake's slice read, to say in what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from stepfs.lake.lineage import LineageReader
from stepfs.view.file_names import names_of
from stepfs.view.naming import step_name
from stepfs_producer.pending import Ticket
from stepfs_producer.plan.step import State
from stepfs_producer.run.workers.tasks import MadeStep

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


class ReplayProducer:
    """Gives tickets as a producer does, and hands the steps that were asked for to `take`, in order."""

    def __init__(
        self, placed: Placed, take: Callable[[Expected, MadeStep, Mapping[str, object]], Awaitable[None]]
    ) -> None:
        self._placed = placed
        self._take = take
        self._reserved: deque[tuple[int, Mapping[str, object]]] = deque()
        self._made: dict[int, MadeStep] = {}

    async def reserve(self, *, position: Mapping[str, object], records: Sequence[int], payload_bytes: int) -> Ticket:
        """A ticket for the step before `position`; the steps that are settled leave memory first."""
        del records, payload_bytes
        await self.flush()
        behind = position["step"]
        assert isinstance(behind, int)
        self._reserved.append((behind - 1, position))
        return Ticket(behind - 1, "")

    def renew(self, ticket: Ticket) -> Ticket:
        """The same ticket: nothing is uploaded."""
        return ticket

    def settle(self, ticket: Ticket, made: MadeStep) -> None:
        self._made[ticket.seq] = made

    async def flush(self) -> None:
        """Take the steps that are settled, up to the first that is not."""
        while self._reserved and self._reserved[0][0] in self._made:
            step, position = self._reserved.popleft()
            made = self._made.pop(step)
            if step in self._placed:
                await self._take(self._placed[step], made, position)


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Compares steps with those of the lake."""

    slices: Sequence[int]
    found: Comparison
    identity: LakeIdentity
    reader: LineageReader

    async def take(self, expected: Expected, made: MadeStep, position: Mapping[str, object]) -> None:
        """Compare one step and the position behind it."""
        entry, grid = expected.entry, self.identity.grid
        self.found.steps += 1
        refs = [entry.tgb.slice(SliceIndex(index)) for index in self.slices]
        for index, payload, count, crc, ref in zip(
            self.slices, made.payloads, made.records, made.crc32c, refs, strict=True
        ):
            if (len(payload), crc, count) != (ref.length, ref.crc32c, ref.records):
                rank = index // (grid.slices // grid.ranks)
                what = await self._in_words(entry, SliceIndex(index), payload)
                self.found.differ(Difference(entry.step, index, rank, what))
        if expected.behind is not None and expected.behind.position() != position:
            what = "the position behind it is another one, so the steps after it begin elsewhere"
            self.found.differ(Difference(entry.step, None, None, what))

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
class StepFiles:
    """Writes steps below a directory, under the names of a mount."""

    slices: Sequence[int]
    found: Comparison
    identity: LakeIdentity
    directory: Path

    async def take(self, expected: Expected, made: MadeStep, _position: Mapping[str, object]) -> None:
        """Write one step. `RefusedError` if it is there, or cannot be written."""
        await trio.to_thread.run_sync(self._write, expected.entry, made.payloads)
        self.found.steps += 1
        self.found.files += len(made.payloads)

    def _write(self, entry: StepEntry, batch: Sequence[bytes]) -> None:
        directory, names = self.directory / step_name(entry.step).decode(), names_of(self.identity)
        try:
            directory.mkdir(parents=True)
            for index, payload in zip(self.slices, batch, strict=True):
                (directory / names.name_of(SliceIndex(index)).decode()).write_bytes(payload)
        except OSError as error:
            raise RefusedError(f"--to {directory}: {error.strerror}; name an empty directory with room") from error


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
