"""The slices in memory, under one budget: their roles, and which block leaves first.

No method awaits, so each is atomic under trio. Invariants:
* the pool's limit is never exceeded; * a block is evictable iff it is READY and unpinned; * a pinned block is dropped only
while everything is pinned: for a reader that is blocked, or, once its own reader has passed it, for reading ahead.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeAlias

from stepfs._internal import tracing
from stepfs.data.blocks import NEXT, Block, CachedSlice, Range, Role, State, join_pieces
from stepfs.data.buffers import Buffer, Pool
from stepfs.data.counters import DataCounts
from stepfs.data.tuning import TUNING
from stepfs.errors import StepfsError, StoreUnreachableError
from stepfs.format.ids import SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry

Distance: TypeAlias = tuple[int, int]
NEAREST: Final[Distance] = (0, 0)  # of the step that is read next
_UNPLANNED: Final = 1

_REOPENED: Final = 1  # blocks read last


class ReadingOrder:
    """The steps of a plan, nearest first; all others are farther, by number."""

    def __init__(self, planned: Iterable[Step] = (), *, low: int = 0, announced: bool = False) -> None:
        """`low`: readers have passed over the steps below that are not planned. `announced`: trainers said this order."""
        self.announced = announced
        self._places = {step: place for place, step in enumerate(planned)}
        self._low = low

    def plans(self, step: Step) -> bool:
        return step in self._places

    def distance(self, step: Step) -> Distance:
        """Greater for a step that is read later."""
        place = self._places.get(step)
        return (_UNPLANNED, step) if place is None else (0, place)

    def farthest(self, steps: Collection[Step]) -> Step | None:
        """The one that is read last; None without any. Made of loops in C: it may be asked of 100,000 at each wake."""
        places = self._places
        unplanned = set(steps).difference(places)
        return max(unplanned) if unplanned else max(steps, key=places.__getitem__, default=None)

    def skipped(self, step: Step) -> bool:
        """Whether no reader is expected at the step: it leaves first."""
        return step < self._low and step not in self._places


class EvictionOrder:
    """The order in which unpinned blocks may go."""

    def __init__(self) -> None:
        self.order = ReadingOrder()  # of the steps ahead
        self._aside: dict[Role, OrderedDict[Block, None]] = {  # oldest first
            Role.CONSUMED: OrderedDict(),
            Role.IDLE: OrderedDict(),
            Role.AWAITED: OrderedDict(),
        }
        self.awaited_bytes = 0
        self._ahead: dict[Step, dict[Block, None]] = {}

    def add(self, block: Block) -> None:
        """File a block by its role, as the newest of it."""
        self.discard(block)
        role = block.role
        if role is Role.WANTED:
            self._ahead.setdefault(block.step, {})[block] = None
        else:
            self._aside[role][block] = None
            self.awaited_bytes += block.range.size if role is Role.AWAITED else 0

    def discard(self, block: Block) -> None:
        for role, filed in self._aside.items():
            if block in filed:
                del filed[block]
                self.awaited_bytes -= block.range.size if role is Role.AWAITED else 0
        blocks = self._ahead.get(block.step)
        if blocks is not None:
            blocks.pop(block, None)
            if not blocks:
                del self._ahead[block.step]

    def pop_unneeded(self) -> Block | None:
        """The oldest consumed block (in an announced order the newest), else the one that is idle for longest."""
        consumed = self._aside[Role.CONSUMED]
        if self.order.announced and len(consumed) > _REOPENED:
            # An epoch reads again last what it has just read; but a loader may open a file twice in a row.
            return self._take(next(itertools.islice(reversed(consumed), _REOPENED, None)))
        for role in (Role.CONSUMED, Role.IDLE):
            if self._aside[role]:
                return self._aside[role].popitem(last=False)[0]
        return None

    def pop_awaited(self, bytes_max: float) -> Block | None:
        """The awaited block that is reached last, if they are more than `bytes_max`."""
        if self.awaited_bytes <= bytes_max:
            return None
        return self._take(next(reversed(self._aside[Role.AWAITED])))

    def pop_spent(self) -> Block | None:
        """The oldest consumed or idle block, else one of the lowest step if readers have passed over it."""
        unneeded = self.pop_unneeded()
        if unneeded is not None or not self._ahead:
            return unneeded
        step = min(self._ahead)
        return self._take(next(iter(self._ahead[step]))) if self.order.skipped(step) else None

    def pop_copied(self, copied: Callable[[Block], bool], *, beyond: Distance) -> Block | None:
        """The farthest block beyond a distance that can be loaded from disk again."""
        if self._farthest(beyond) is None:
            return None
        for step in sorted(self._ahead, key=self.order.distance, reverse=True):
            if self.order.distance(step) <= beyond:
                return None
            for block in self._ahead[step]:
                if copied(block):
                    return self._take(block)
        return None

    def pop_farthest(self, *, beyond: Distance | None = None) -> Block | None:
        """A block of the farthest step, if that is beyond a distance."""
        step = self._farthest(beyond)
        return None if step is None else self._take(next(reversed(self._ahead[step])))

    def _farthest(self, beyond: Distance | None) -> Step | None:
        step = self.order.farthest(self._ahead)
        near = step is None or (beyond is not None and self.order.distance(step) <= beyond)
        return None if near else step

    def _take(self, block: Block) -> Block:
        self.discard(block)
        return block


def find_skipped(asking: Block, slices: Iterable[CachedSlice]) -> Block | None:
    """The pinned block that is read last, if that is later than `asking`; its one slice is `BEHIND` once it has gone."""
    distance = 0 if asking.waiting else _distance(asking)
    if distance is None:
        return None
    found: Block | None = None
    rank = (False, distance)  # blocks behind a reader leave first, then those farthest ahead
    for held in slices:
        if not held.role.pinned or len(held.places) < 2 or held.read_at == float("-inf"):
            continue  # of files that were opened and not read, the bytes are promised
        for number, block in enumerate(held.places):
            if block is None or block.state is not State.READY or block.waiting or len(block.owners) > 1:
                continue
            ahead = number - held.reading
            if (ahead < 0, abs(ahead)) > rank:
                found, rank = block, (ahead < 0, abs(ahead))
    return found


def _distance(asking: Block) -> int | None:
    """Blocks from the reader to `asking`; None where reading ahead may use free memory only."""
    if not asking.pinned:
        return None
    ahead = asking.range.pieces[0].block - min(owner.reading for owner in asking.owners)
    streak = min(TUNING.reach_shift_max, *(owner.streak for owner in asking.owners))
    return ahead if 0 <= ahead < 1 << streak + 1 else None


class Cache:
    """Slices and blocks in memory."""

    def __init__(self, pool: Pool, counts: DataCounts, on_disk: Callable[[CachedSlice], bool]) -> None:
        self.pool = pool
        self._on_disk = on_disk
        self.evictable = EvictionOrder()
        self._counts = counts
        self._slices: dict[SliceKey, CachedSlice] = {}
        self.floor = Step(0)  # steps below are needed by open files alone
        self._unsaved: dict[Block, int] = {}  # fetched ahead, not on disk (yet): capacity
        self._unsaved_bytes = 0

    def get(self, step: Step, index: SliceIndex) -> CachedSlice | None:
        return self._slices.get((step, index))

    def get_or_add(self, entry: StepEntry, index: SliceIndex) -> CachedSlice:
        """The slice's entry in the table, made if need be."""
        held = self._slices.get((entry.step, index))
        if held is None:
            held = self._slices[entry.step, index] = CachedSlice(entry, index)
        return held

    def set_role(self, held: CachedSlice, role: Role) -> None:
        """Give a slice another role: one that may follow its present one (`blocks.NEXT`)."""
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
        held = {index: self.get_or_add(entry, index) for index in indices}
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
            self._evict(victim)
        if not block.pinned and not self.copied(block) and block not in self._unsaved:
            self._unsaved[block] = buffer.capacity
            self._unsaved_bytes += buffer.capacity
        return buffer

    def saved(self, held: CachedSlice) -> None:
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
        spent = self.evictable.pop_spent() or self.evictable.pop_awaited(TUNING.awaited_share * self.pool.limit)
        if spent is not None:
            return spent
        own = None if asking.pinned else self.evictable.order.distance(asking.step)
        loading = self.copied(asking)
        ahead_of_disk = loading or self._unsaved_bytes > TUNING.unsaved_share * self.pool.limit
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

    def _evict(self, block: Block) -> None:
        self._counts.evicted += 1
        if tracing.ring is not None:
            tracing.ring.add("evictions", f"step {block.step}", step=block.step, size=block.range.size)
        self.drop(block)

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

    def lower_floor(self, step: Step) -> None:
        """The step is wanted again, though it was forgotten: a group went back to an older checkpoint."""
        self.floor = min(self.floor, step)

    def charge(self, size: int) -> bool:
        """Count `size` bytes of pages against the budget; only consumed or idle blocks are evicted for them."""
        while not self.pool.charge(size):
            victim = self.evictable.pop_unneeded()
            if victim is None:
                return False
            self._evict(victim)
        return True

    def release(self, held: CachedSlice) -> None:
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
            self._evict(victim)

    def opened(self) -> list[CachedSlice]:
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
        block = find_skipped(asking, self._slices.values())
        if block is not None:
            self.set_role(block.owners[0], Role.BEHIND)
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

    def _tidy(self, held: CachedSlice) -> None:
        if not held.handles and not any(held.places):
            self._slices.pop(held.key, None)


def _blocks(held: CachedSlice) -> list[Block]:
    return list(dict.fromkeys(block for block in held.places if block is not None))


class OpenSlices:
    """The open slices of one mount that are pinned by recency. Plain state, no I/O."""

    def __init__(self) -> None:
        self._recent: OrderedDict[CachedSlice, None] = OrderedDict()  # least recently opened or reading first
        self._steps: Counter[Step] = Counter()  # of `_recent`
        self._bytes = 0  # of `_recent`
        self._newest = Step(0)  # its ranks open it one after another, before they read

    def add(self, held: CachedSlice) -> None:
        self.discard(held)
        self._recent[held] = None
        self._newest = held.entry.step
        self._steps[held.entry.step] += 1
        self._bytes += held.length

    def discard(self, held: CachedSlice) -> None:
        """The slice was closed, or is pinned for good."""
        if held in self._recent:
            del self._recent[held]
            self._bytes -= held.length
            self._steps[held.entry.step] -= 1
            if not self._steps[held.entry.step]:
                del self._steps[held.entry.step]

    def take_idle(self, budget_bytes: int, now: float) -> list[CachedSlice]:
        """Slices without a reader, oldest first. `now` in seconds, as in `CachedSlice.read_at`."""
        found: list[CachedSlice] = []
        spared = 0
        while spared < TUNING.spared_max and self._is_too_much(budget_bytes):
            oldest = next(iter(self._recent))
            if oldest.entry.step == self._newest or _is_being_read(oldest, now):
                self._recent.move_to_end(oldest)
                spared += 1
                continue
            self.discard(oldest)
            found.append(oldest)
        return found

    def _is_too_much(self, budget_bytes: int) -> bool:
        """Ranks that open one large step together are never too much."""
        steps = len(self._steps)
        return steps > TUNING.open_steps_max or (steps > 1 and self._bytes > TUNING.open_share * budget_bytes)


def _is_being_read(held: CachedSlice, now: float) -> bool:
    return now - held.read_at < TUNING.reading_s or any(place is not None and place.waiting for place in held.places)
