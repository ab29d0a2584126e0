"""The slices in memory, under one budget: the state machine behind `Slices`, without I/O and without waiting.

No method awaits, so each is atomic under trio. Invariants:
* the pool's limit is never exceeded; * a pinned block is dropped only while everything is pinned: for a reader that is
blocked (better a second fetch than a deadlock), or, once its own reader has passed it, for reading ahead (`passed`);
* a block is evictable iff it is READY and unpinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from stepfs.data.blocks import Block, HeldSlice, State
from stepfs.data.buffers import Buffer, Pool
from stepfs.data.cache.eviction import EvictionOrder
from stepfs.data.cache.passed import find_passed
from stepfs.data.cache.reading_order import NEAREST
from stepfs.data.counters import DataCounts
from stepfs.data.ranges import Range, join_pieces
from stepfs.data.roles import NEXT, Role
from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry

_UNSAVED_SHARE: Final = 0.5  # of the budget
_AWAITED_SHARE: Final = 0.5  # of the budget: for readers behind, not taken by reading ahead


class Cache:
    """Slices and blocks in memory."""

    def __init__(self, pool: Pool, counts: DataCounts, on_disk: Callable[[HeldSlice], bool]) -> None:
        self.pool = pool
        self._on_disk = on_disk
        self.evictable = EvictionOrder()
        self._counts = counts
        self._slices: dict[SliceKey, HeldSlice] = {}
        self.floor = Step(0)  # steps below are needed by open files alone
        self._unsaved: dict[Block, int] = {}  # fetched ahead, not on disk (yet): capacity
        self._unsaved_bytes = 0

    def get(self, step: Step, index: SliceIndex) -> HeldSlice | None:
        return self._slices.get((step, index))

    def hold(self, entry: StepEntry, index: SliceIndex) -> HeldSlice:
        """The slice's entry in the table, made if need be."""
        held = self._slices.get((entry.step, index))
        if held is None:
            held = self._slices[entry.step, index] = HeldSlice(entry, index)
        return held

    def set_role(self, held: HeldSlice, role: Role) -> None:
        """Give a slice another role: one that may follow its present one (`roles.NEXT`)."""
        if role is held.role:
            return
        assert role in NEXT[held.role], f"{held.key}: {held.role.name} → {role.name}"
        held.role = role
        if not held.handles:
            held.rewind()
        for block in _blocks(held):
            if role.pinned:
                self.evictable.discard(block)
                self._settle(block)
            elif block.state is State.FAILED:
                self._detach(block)  # the next open tries again
            else:
                self._file(block)
        self._tidy(held)

    def is_pinned(self, key: SliceKey) -> bool:
        """Whether the slice is open and read, or was just opened."""
        held = self._slices.get(key)
        return held is not None and held.role.pinned

    def plan(self, entry: StepEntry, indices: Iterable[SliceIndex]) -> list[Block]:
        """New QUEUED blocks for every piece of these slices that is neither held nor being fetched."""
        held = {index: self.hold(entry, index) for index in indices}
        blocks = []
        for range_ in join_pieces(each.pieces[number] for each in held.values() for number in each.missing):
            owners = list({piece.index: held[piece.index] for piece in range_.pieces}.values())
            block = Block(entry, range_, owners)
            for piece in range_.pieces:
                held[piece.index].places[piece.block] = block
            blocks.append(block)
        for each in held.values():
            self._tidy(each)  # an empty slice holds nothing
        return blocks

    def lease(self, size: int, block: Block) -> Buffer | None:
        """A buffer for `block`, after evictions that its rank allows; None: wait for a release."""
        while (buffer := self.pool.take(size)) is None:
            victim = self._victim(block)
            if victim is None:
                return None
            self.drop(victim)
            self._counts.evicted += 1
        if not block.pinned and not self.copied(block) and block not in self._unsaved:
            self._unsaved[block] = buffer.capacity
            self._unsaved_bytes += buffer.capacity
        return buffer

    def saved(self, held: HeldSlice) -> None:
        for block in _blocks(held):
            if self.copied(block):
                self._settle(block)

    def _settle(self, block: Block) -> None:
        self._unsaved_bytes -= self._unsaved.pop(block, 0)

    def _victim(self, asking: Block) -> Block | None:
        """Spent blocks first; then blocks that are on disk, which cost no request; then blocks that are read last.

        A prefetch displaces only blocks that are read later, with one exception: from the store it displaces nearer blocks
        that are on disk, so that the disk fills beyond memory, as long as it does not run ahead of the disk. A
        block that is itself on disk never displaces one that is not, unless a reader is blocked on it: waiting costs less.
        """
        spent = self.evictable.pop_spent() or self.evictable.pop_awaited(_AWAITED_SHARE * self.pool.limit)
        if spent is not None:
            return spent
        own = None if asking.pinned else self.evictable.order.distance(asking.step)
        loading = self.copied(asking)
        ahead_of_disk = loading or self._unsaved_bytes > _UNSAVED_SHARE * self.pool.limit
        near = own if own is not None and ahead_of_disk else NEAREST
        copied = self.evictable.pop_copied(self.copied, beyond=near)
        if copied is not None or (loading and not asking.waiting):
            return copied
        return (
            self.evictable.pop_farthest(beyond=own)
            or (self.evictable.pop_awaited(0) if asking.pinned else None)
            or self._passed_victim(asking)
            or self._pinned_victim(asking)
        )

    def ready(self, block: Block, buffer: Buffer) -> None:
        assert block.state is State.FETCHING
        block.state, block.buffer = State.READY, buffer
        block.settled.set()
        self._file(block)

    def fail(self, block: Block, error: StepfsError) -> None:
        """The block cannot be had. Kept while its files are open, so that each read does not fetch it anew."""
        self._settle(block)
        block.state, block.error = State.FAILED, error
        block.settled.set()
        if not block.pinned or isinstance(error, StoreUnreachableError):
            self._detach(block)

    def split(self, block: Block) -> list[Block]:
        """New QUEUED blocks in its place, one for each owner's piece: an error of one will not be another's."""
        parts = []
        for piece in block.range.pieces:
            [owner] = [owner for owner in block.owners if owner.index == piece.index]
            part = Block(block.entry, Range(piece.offset, piece.length, (piece,)), [owner])
            owner.places[piece.block] = part
            parts.append(part)
        self.drop(block)  # its readers look again, and find the parts
        return parts

    def drop(self, block: Block) -> None:
        """Forget a block in any state; its memory is released once no reader sees it."""
        self.evictable.discard(block)
        self._settle(block)
        block.state = State.DROPPED
        block.settled.set()
        if block.buffer is not None:
            self.pool.give(block.buffer)
            block.buffer = None
        self._detach(block)

    def forget_below(self, step: Step) -> None:
        """Steps below are not needed: their unpinned blocks go now, the others when they are closed or arrive."""
        self.floor = step
        for held in [held for held in self._slices.values() if held.entry.step < step]:
            for block in _blocks(held):
                if block.state in (State.READY, State.QUEUED) and not block.pinned:
                    self.drop(block)

    def needed(self, step: Step) -> None:
        """The step is wanted again, though it was forgotten: a group went back to an older checkpoint."""
        self.floor = min(self.floor, step)

    def charge(self, size: int) -> bool:
        """Count `size` bytes of pages against the budget; only consumed or idle blocks are evicted for them."""
        while not self.pool.charge(size):
            victim = self.evictable.pop_unneeded()
            if victim is None:
                return False
            self.drop(victim)
            self._counts.evicted += 1
        return True

    def release(self, held: HeldSlice) -> None:
        """Drop the copy in memory of an unpinned slice."""
        for block in _blocks(held):
            if block.state is State.READY and not block.pinned and self.copied(block):
                self.drop(block)

    def shrink(self, limit: int) -> None:
        """Live within `limit` bytes from now on; pinned blocks stay, and go over it until they are closed."""
        while self.pool.set_limit(limit):
            order = self.evictable
            victim = order.pop_spent() or order.pop_farthest() or order.pop_awaited(0)
            if victim is None:
                return
            self.drop(victim)
            self._counts.evicted += 1

    def opened(self) -> list[HeldSlice]:
        return [held for held in self._slices.values() if held.handles]

    def blocks(self) -> set[Block]:
        return {block for held in self._slices.values() for block in _blocks(held)}

    def _file(self, block: Block) -> None:
        if block.state is not State.READY or block.pinned:
            return
        if block.step < self.floor or self.pool.used > self.pool.limit:
            self.drop(block)  # not needed, or pinned while the budget shrank
        else:
            self.evictable.add(block)

    def copied(self, block: Block) -> bool:
        """Whether the bytes can be loaded from disk."""
        return all(self._on_disk(owner) for owner in block.owners)

    def _passed_victim(self, asking: Block) -> Block | None:
        block = find_passed(asking, self._slices.values())
        if block is not None:
            self.set_role(block.owners[0], Role.PASSED)
        return block

    def _pinned_victim(self, asking: Block) -> Block | None:
        if not asking.waiting:
            return None
        idle = [block for block in self.blocks() if block.state is State.READY and not block.waiting]
        return min(idle, key=lambda block: block.read_at, default=None)

    def _detach(self, block: Block) -> None:
        for owner in block.owners:
            owner.places = [None if place is block else place for place in owner.places]
            self._tidy(owner)

    def _tidy(self, held: HeldSlice) -> None:
        if not held.handles and not any(held.places):
            self._slices.pop(held.key, None)


def _blocks(held: HeldSlice) -> list[Block]:
    return list(dict.fromkeys(block for block in held.places if block is not None))
