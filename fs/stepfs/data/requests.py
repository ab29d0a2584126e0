"""The slices that will be opened next, as the prefetcher requests them and the primer follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stepfs.data.cache.disk import DiskCache
from stepfs.data.cache.memory import Cache
from stepfs.data.cache.reading_order import ReadingOrder
from stepfs.data.queue import FetchQueue, PrefetchRequest
from stepfs.data.roles import Role


class PrefetchRequests:
    """The newest list of requests; everything about it that concerns slices already in memory."""

    def __init__(
        self, cache: Cache, disk: DiskCache | None, queue: FetchQueue, changed: Callable[[], None]
    ) -> None:
        """`changed` is called for each change of the list."""
        self._cache = cache
        self._disk = disk
        self._queue = queue
        self._changed = changed

    def replace(self, requests: Iterable[PrefetchRequest]) -> None:
        """Replace the list, nearest first. The slices are fetched as the budget allows."""
        requested = self._queue.prefetch(requests)
        for held in self._cache.opened():
            if held.role is Role.IDLE and held.key in requested:
                self._cache.set_role(held, Role.WANTED)
        self._changed()

    def listed(self) -> Sequence[PrefetchRequest]:
        """The requests, nearest first."""
        return self._queue.prefetch_requests

    def replan(self) -> None:
        """Plan the requests afresh: slices that were counted as primed have left the page cache."""
        self._queue.replan()
        self._changed()

    def set_order(self, order: ReadingOrder) -> None:
        """Set in which order the readers open steps: those that are opened last are evicted first."""
        self._cache.evictable.order = order
        if self._disk is not None:
            self._disk.order = order
