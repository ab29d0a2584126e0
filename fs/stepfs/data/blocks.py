"""A slice as a row of blocks: what one GET fetches, how much it is needed, and whether it has its checksums.

Values and pure functions; nothing here waits. A block is fetched and verified as a whole.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import trio
from crc32c import crc32c

from stepfs.data.buffers import Buffer
from stepfs.data.waiting import Cause
from stepfs.errors import StepfsError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import ALIGNMENT_BYTES, SliceRef

RANGE_BYTES_MAX: Final = BLOCK_BYTES + BLOCK_BYTES // 8
OVERREAD_MAX: Final = 0.02  # share of unwanted bytes tolerated inside one joined GET


@dataclass(frozen=True, slots=True)
class Piece:
    """The smallest verifiable run of bytes: a whole small slice, or one block of a large one."""

    index: SliceIndex
    block: int  # number of the block inside its slice, 0 for a small slice
    offset: int  # in the object
    length: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Range:
    """One ranged GET: bytes [offset, offset + size) of an object, and the blocks to verify in them."""

    offset: int
    size: int
    pieces: tuple[Piece, ...]


def pieces_of(index: SliceIndex, ref: SliceRef) -> list[Piece]:
    """A slice as verifiable pieces, in order; none for an empty slice."""
    if not ref.blocks:
        return [Piece(index, 0, ref.offset, ref.length, ref.crc32c)] if ref.length else []
    return [
        Piece(
            index, number, ref.offset + number * BLOCK_BYTES, min(BLOCK_BYTES, ref.length - number * BLOCK_BYTES), crc
        )
        for number, crc in enumerate(ref.blocks)
    ]


def join_pieces(wanted: Iterable[Piece]) -> list[Range]:
    """Pieces of one object that are wanted together → the GETs that fetch them, by offset."""
    pieces = sorted(wanted, key=lambda piece: piece.offset)
    ranges: list[Range] = []
    run: list[Piece] = []
    needed = 0  # bytes of `run`
    for piece in pieces:
        if run and not _joins(run[0], run[-1], needed, piece):
            ranges.append(_range(run))
            run, needed = [], 0
        run.append(piece)
        needed += piece.length
    if run:
        ranges.append(_range(run))
    return ranges


def _joins(first: Piece, last: Piece, needed: int, piece: Piece) -> bool:
    gap = piece.offset - (last.offset + last.length)
    size = piece.offset + piece.length - first.offset
    if needed >= BLOCK_BYTES or size > RANGE_BYTES_MAX or gap < 0:
        return False
    return gap < ALIGNMENT_BYTES or size - needed - piece.length <= OVERREAD_MAX * (needed + piece.length)


def _range(run: list[Piece]) -> Range:
    size = run[-1].offset + run[-1].length - run[0].offset
    assert 0 < size <= RANGE_BYTES_MAX
    return Range(run[0].offset, size, tuple(run))


class Role(enum.IntEnum):
    """How much a slice is needed, least first."""

    CONSUMED = 0
    IDLE = 1
    AWAITED = 2
    WANTED = 3
    BEHIND = 4
    OPEN = 5

    @property
    def pinned(self) -> bool:
        """Whether the blocks stay in memory as long as anything else can leave it."""
        return self >= Role.BEHIND


_CLOSED: Final = frozenset({Role.AWAITED, Role.CONSUMED})

NEXT: Final[Mapping[Role, frozenset[Role]]] = {
    Role.WANTED: _CLOSED | {Role.OPEN},
    Role.OPEN: _CLOSED | {Role.BEHIND, Role.IDLE},
    Role.BEHIND: _CLOSED | {Role.IDLE},
    Role.IDLE: _CLOSED | {Role.OPEN, Role.WANTED},
    Role.AWAITED: frozenset({Role.OPEN, Role.CONSUMED}),
    Role.CONSUMED: frozenset({Role.OPEN, Role.AWAITED, Role.WANTED}),
}


class State(enum.Enum):
    """QUEUED → FETCHING → READY or FAILED; DROPPED ends all of them."""

    QUEUED = enum.auto()
    FETCHING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    DROPPED = enum.auto()


class Block:
    """One ranged GET and its result. `buffer` holds verified bytes iff READY."""

    __slots__ = (
        "buffer", "entry", "error", "held_s", "owners", "phases", "range", "read_at", "settled", "short_s", "state", "waiting"
    )  # fmt: skip

    def __init__(self, entry: StepEntry, range_: Range, owners: list[CachedSlice]) -> None:
        self.entry = entry
        self.range = range_
        self.owners = owners  # the slices with a piece in it
        self.state = State.QUEUED
        self.buffer: Buffer | None = None
        self.error: StepfsError | None = None
        self.settled = trio.Event()  # READY, FAILED or DROPPED
        self.waiting = 0  # readers blocked on it
        self.read_at = 0.0  # trio time of the last read
        self.short_s: float | None = None  # trio time since which it cannot begin for want of memory
        self.held_s = 0.0  # how long it could not, until it began
        self.phases: list[tuple[float, Cause]] = []  # since when it is fetched from where

    def enter(self, cause: Cause) -> None:
        """It is fetched from another place from now on."""
        if not self.phases or self.phases[-1][1] is not cause:
            self.phases.append((trio.current_time(), cause))

    def recast(self, cause: Cause) -> None:
        """What was asked last did not answer, or only hesitantly."""
        self.phases[-1] = self.phases[-1][0], cause

    def begin(self) -> None:
        """Memory was found for it."""
        self.state = State.FETCHING
        if self.short_s is not None:
            self.held_s, self.short_s = trio.current_time() - self.short_s, None

    def blame(self, began_s: float) -> dict[Cause, float]:
        """Seconds by cause of a wait for it since `began_s`. With room for it earlier, it would have come so much earlier."""
        now_s = trio.current_time()
        waited_s = now_s - began_s
        held_s = self.held_s if self.short_s is None else now_s - self.short_s
        memory_s = min(waited_s, held_s)
        parts: dict[Cause, float] = {}
        ends_s = now_s
        for since_s, cause in reversed(self.phases):
            if ends_s <= began_s:
                break
            start_s = max(since_s, began_s)
            parts[cause] = parts.get(cause, 0.0) + ends_s - start_s
            ends_s = start_s
        parts[Cause.STORE] = parts.get(Cause.STORE, 0.0) + ends_s - began_s  # all connections are at work
        if memory_s:
            parts = {cause: part * (1 - memory_s / waited_s) for cause, part in parts.items()}
            parts[Cause.MEMORY] = parts.get(Cause.MEMORY, 0.0) + memory_s
        return parts

    @property
    def step(self) -> Step:
        return self.entry.step

    @property
    def role(self) -> Role:
        return max(owner.role for owner in self.owners)

    @property
    def pinned(self) -> bool:
        return self.role.pinned


class CachedSlice:
    """A slice that is open, cached in part or whole, or being fetched."""

    __slots__ = (
        "entry", "handles", "index", "loading", "pieces", "places", "read_at", "reading", "ref", "role", "streak"
    )  # fmt: skip

    def __init__(self, entry: StepEntry, index: SliceIndex) -> None:
        self.entry = entry
        self.index = index
        self.ref = entry.tgb.slice(index)
        self.pieces = pieces_of(index, self.ref)
        self.places: list[Block | None] = [None] * len(self.pieces)
        self.handles = 0  # open files
        self.role = Role.WANTED  # changed by `Cache.set_role` alone
        self.read_at = float("-inf")  # trio time of the last READ
        self.reading = 0  # block number of the latest read: blocks near it are fetched first
        self.loading = 0  # blocks under way
        self.streak = 0  # blocks that were read in order, up to `reading`

    @property
    def key(self) -> tuple[Step, SliceIndex]:
        return self.entry.step, self.index

    @property
    def length(self) -> int:
        return self.ref.length

    def move_to(self, number: int) -> None:
        """A reader is at this block. READs that the kernel sent together may come in another order."""
        if number == self.reading + 1:
            self.streak += 1
        elif number == self.reading - 1 and self.streak:
            return
        elif number != self.reading:
            self.streak = 0
        self.reading = number

    def rewind(self) -> None:
        """The last reader closed it: the next one begins at the beginning."""
        self.reading, self.streak, self.read_at = 0, 0, float("-inf")

    @property
    def missing(self) -> list[int]:
        """Numbers of the blocks that are neither held nor being fetched, and that are worth fetching."""
        first = self.reading if self.role is Role.BEHIND else 0
        return [number for number in range(first, len(self.places)) if self.places[number] is None]

    @property
    def ready(self) -> bool:
        return all(place is not None and place.state is State.READY for place in self.places)

    def is_ready(self, number: int) -> bool:
        place = self.places[number]
        return place is not None and place.state is State.READY

    def window(self, number: int, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of block `number` of this slice, which must be READY."""
        block = self.places[number]
        assert block is not None
        assert block.buffer is not None
        assert 0 <= start <= stop <= BLOCK_BYTES
        base = self.pieces[number].offset - block.range.offset
        return block.buffer.view(base + start, base + stop)


class RangeCheck:
    """Follows the bytes of `range_` into `buffer`, in order."""

    def __init__(self, range_: Range, buffer: Buffer) -> None:
        self._range = range_
        self._buffer = buffer
        self._landed = 0  # bytes of the range
        self._piece = 0  # number of the piece that is being summed
        self._sum = 0
        self._problem: str | None = None

    @property
    def landed(self) -> int:
        """Bytes so far."""
        return self._landed

    def update(self, stop: int) -> None:
        """Bytes up to `stop` are in the buffer now. One thread at a time."""
        while self._piece < len(self._range.pieces):
            piece = self._range.pieces[self._piece]
            first = piece.offset - self._range.offset
            last = first + piece.length
            start = max(first, self._landed)
            if start < min(stop, last):
                self._sum = crc32c(self._buffer.view(start, min(stop, last)), self._sum)
            if stop < last:
                break
            if self._sum != piece.crc32c and self._problem is None:
                self._problem = (
                    f"slice {piece.index} block {piece.block}: CRC32C {self._sum:08x}, committed as {piece.crc32c:08x}"
                )
            self._piece += 1
            self._sum = 0
        self._landed = max(self._landed, stop)

    def problem(self, got: int) -> str | None:
        """The defect of the range of which `got` bytes arrived, or None: then every piece has its checksum."""
        if got != self._range.size:
            return f"truncated object, {got} of {self._range.size} bytes at offset {self._range.offset}"
        self.update(got)  # the bytes without a progress report
        return self._problem
