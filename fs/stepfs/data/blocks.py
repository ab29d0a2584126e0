"""The values the other rooms share: a block with its state, a slice as a row of blocks.

A block is what one GET fetches and what is verified as a whole. Rejected by measurement (`scripts/bench_read --only
cold`, slices of 64 MiB, loopback, two cores): to answer a READ as soon as its own MiB has landed gave 0.68 and 0.81 of
boto3's speed where whole blocks gave 0.83 (rounds of five); smaller blocks, of 4, 2 and 1 MiB, gave 0.70, 0.70, 0.45.
"""

from __future__ import annotations

import enum

import trio

from stepfs.data.buffers import Buffer
from stepfs.data.ranges import Range, pieces_of
from stepfs.data.roles import Role
from stepfs.errors import StepfsError
from stepfs.format.ids import BLOCK_BYTES, SliceIndex, Step
from stepfs.format.snapshot import StepEntry


class State(enum.Enum):
    """QUEUED → FETCHING → READY or FAILED; DROPPED ends all of them."""

    QUEUED = enum.auto()
    FETCHING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()
    DROPPED = enum.auto()


class Block:
    """One ranged GET and its result. `buffer` holds verified bytes iff READY."""

    __slots__ = ("buffer", "entry", "error", "owners", "range", "read_at", "settled", "state", "waiting")

    def __init__(self, entry: StepEntry, range_: Range, owners: list[HeldSlice]) -> None:
        self.entry = entry
        self.range = range_
        self.owners = owners  # the slices with a piece in it
        self.state = State.QUEUED
        self.buffer: Buffer | None = None
        self.error: StepfsError | None = None
        self.settled = trio.Event()  # READY, FAILED or DROPPED
        self.waiting = 0  # readers blocked on it
        self.read_at = 0.0  # trio time of the last read

    @property
    def step(self) -> Step:
        return self.entry.step

    @property
    def role(self) -> Role:
        return max(owner.role for owner in self.owners)

    @property
    def pinned(self) -> bool:
        return self.role.pinned


class HeldSlice:
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
        first = self.reading if self.role is Role.PASSED else 0
        return [number for number in range(first, len(self.places)) if self.places[number] is None]

    @property
    def ready(self) -> bool:
        return all(place is not None and place.state is State.READY for place in self.places)

    def is_ready(self, number: int) -> bool:
        """Whether block `number` is verified and in memory."""
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
