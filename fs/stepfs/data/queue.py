"""The next fetches: demands of open files, then prefetch requests, planned as late as possible so that neighbours join.

Without I/O and without waiting. Demands of one turn of the loop are planned together, with the prefetch requests for
the same step; prefetch requests one step at a time, whenever the queue is empty. Skip requests already opened or read
since they were queued: they may have been served and evicted. Skip recently failed requests for 10 s.

An open slice has a few blocks under way, those nearest to its reader. With all of them under way the first comes with
the last ones on a link that is full: a reader has to wait for all, and has nothing more to fetch while it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from stepfs.data.blocks import Block, HeldSlice, State
from stepfs.data.cache.memory import Cache
from stepfs.format.ids import SliceIndex, SliceKey, Step
from stepfs.format.snapshot import StepEntry

_REST_S: Final = 10.0

PrefetchRequest = tuple[StepEntry, Sequence[SliceIndex]]


@dataclass(eq=False)
class FetchQueue:
    """The queue of blocks to fetch."""

    cache: Cache
    on_disk: Callable[[HeldSlice], bool]
    primed: Callable[[], Container[SliceKey]]

    def __post_init__(self) -> None:
        self._demands: dict[Step, tuple[StepEntry, set[SliceIndex]]] = {}
        self.prefetch_requests: list[PrefetchRequest] = []
        self._planned = 0  # requests before it were planned
        self._served_since: set[SliceKey] = set()  # demanded or read, since the requests were made
        self._rest: dict[SliceKey, float] = {}
        self._queue: list[Block] = []

    def demand(self, held: HeldSlice) -> None:
        """An open file needs all of this slice."""
        self._demands.setdefault(held.entry.step, (held.entry, set()))[1].add(held.index)
        self.note_reading(held)

    def note_reading(self, held: HeldSlice) -> None:
        """A reader has the slice, or demands it. One that only opens it, to look or to map it, takes nothing."""
        self._served_since.add(held.key)

    def closed(self, held: HeldSlice) -> None:
        """The last reader closed it: drop fetches that have not started, unless the file was only looked at."""
        if held.entry.step in self._demands:
            self._demands[held.entry.step][1].discard(held.index)
        if held.key in self._served_since:
            for block in self._queue:
                if held in block.owners and block.state is State.QUEUED and not block.pinned:
                    self.cache.drop(block)

    def prefetch(self, prefetch_requests: Iterable[PrefetchRequest]) -> set[SliceKey]:
        """Replace the prefetch requests, nearest first; drops the blocks of former ones. Returns the requested slices."""
        self.prefetch_requests = list(prefetch_requests)
        self._planned = 0
        self._served_since.clear()
        requested = {(entry.step, index) for entry, indices in self.prefetch_requests for index in indices}
        for block in self._queue:
            if block.state is State.QUEUED and not block.pinned:
                self.cache.drop(block)  # it may be read last now: waiting for memory, it would hold up all others
        return requested

    def replan(self) -> None:
        """A block that was in memory, or counted as such, is gone: look at all requests again."""
        self._planned = 0

    def forget_below(self, step: Step) -> None:
        self.prefetch_requests = [request for request in self.prefetch_requests if request[0].step >= step]
        self._planned = 0

    def failed(self, block: Block) -> None:
        """The block cannot be had now; only readers try again at once."""
        for owner in block.owners:
            self._rest[owner.key] = trio.current_time() + _REST_S

    def split(self, block: Block) -> None:
        """Fetch the pieces of a joined block one by one."""
        self._queue += self.cache.split(block)

    def next(self, *, prefetch: bool, in_order: int) -> Block | None:
        """The most urgent block, still queued; with `prefetch`, not only for open files. Of an open slice at most
        `in_order` blocks are under way, and nothing is fetched ahead while others of it are held back."""
        for entry, indices in self._demands.values():
            also = [request for request in self.prefetch_requests if request[0].step == entry.step]
            self._plan(entry, indices.union(*map(self._outstanding, also)))
        self._demands.clear()
        self._queue = [block for block in self._queue if block.state is State.QUEUED]
        while prefetch and not self._queue and self._planned < len(self.prefetch_requests):
            request = self.prefetch_requests[self._planned]
            self._planned += 1
            self._plan(request[0], self._outstanding(request))
        ready = [block for block in self._queue if not _is_held_back(block, in_order)]
        block = min(ready, key=_urgency, default=None)
        prefetch = prefetch and len(ready) == len(self._queue)
        return block if block is not None and (block.pinned or prefetch) else None

    def _plan(self, entry: StepEntry, indices: Iterable[SliceIndex]) -> None:
        self.cache.needed(entry.step)
        fetched = []
        for index in indices:
            if self.on_disk(self.cache.hold(entry, index)):
                self._queue += self.cache.plan(entry, [index])  # a file each
            else:
                fetched.append(index)
        self._queue += self.cache.plan(entry, fetched)

    def _outstanding(self, request: PrefetchRequest) -> list[SliceIndex]:
        """The slices of a request that are neither served since, nor resting after a failure, nor in the page cache."""
        entry, requested = request
        step, served_since, primed = entry.step, self._served_since, self.primed()
        outstanding = [
            index for index in requested if (step, index) not in primed and (step, index) not in served_since
        ]
        if self._rest:
            now = trio.current_time()
            self._rest = {key: until for key, until in self._rest.items() if until > now}
            outstanding = [index for index in outstanding if (step, index) not in self._rest]
        return outstanding


def _is_held_back(block: Block, in_order: int) -> bool:
    return block.owners[0].loading >= in_order and block.pinned and not block.waiting


def _urgency(block: Block) -> tuple[int, int, int]:
    """Smallest first: a reader is blocked on it; of an open file, nearest to where it is read; the nearest step."""
    if block.waiting:
        return 0, 0, 0
    if block.pinned:
        piece = block.range.pieces[0]
        ahead = piece.block - min(owner.reading for owner in block.owners)
        return 1, 0 if ahead >= 0 else 1, abs(ahead)
    return 2, block.step, block.range.offset
