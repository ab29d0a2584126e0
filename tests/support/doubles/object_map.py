"""The objects of the simulated store, and the requests on their way: one map per lake, shared by all processes.

Requests that outlive their sender (delayed ones, and those on the wire when a process is killed) need no task: the map
keeps them with their time of arrival, and applies them before the first access at or after that time. No simulated
process can see the difference.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from stepfs.store.api import Entry

Listing = list[Entry]


class Event(NamedTuple):
    """One request as the server saw it; `outcome` is its result, `fault` the error of the server or the network."""

    time_us: int
    actor: str
    verb: str
    keys: tuple[str, ...]  # one, or those of a batch delete; the prefix of a list
    outcome: str
    fault: str = ""
    crc: int = 0  # of the body of a create or put


@dataclass(slots=True)
class ObjectMap:
    """The durable objects, the requests on their way, and the trace of all requests."""

    objects: dict[str, bytes] = field(default_factory=dict)
    trace: list[Event] = field(default_factory=list)
    watch: Callable[[Event], None] | None = None  # called after each request, for invariants that hold at every moment
    away_until_s: float = -math.inf  # until then the server is stopped
    now_s: float = -math.inf  # virtual time of the last request; older objects have no age
    _written_s: dict[str, float] = field(default_factory=dict)
    _keys: list[str] = field(default_factory=list)
    _landing: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _landings: int = 0

    def digest(self) -> str:
        """Hex digest of the trace: equal for equal runs."""
        return hashlib.sha256("\n".join(map(repr, self.trace)).encode()).hexdigest()

    def note(self, event: Event) -> None:
        self.trace.append(event)
        if self.watch is not None:
            self.watch(event)

    def land_at(self, time_s: float, effect: Callable[[float], None]) -> None:
        """Carry out `effect` at virtual time `time_s`."""
        heapq.heappush(self._landing, (time_s, self._landings, effect))
        self._landings += 1

    def settle(self, now_s: float) -> None:
        """Apply the requests that arrived by `now_s`; call it before reading `objects` directly."""
        while self._landing and self._landing[0][0] <= now_s:
            time_s, _, effect = heapq.heappop(self._landing)
            self.now_s = time_s
            effect(time_s)
        self.now_s = now_s

    def put(self, key: str, body: bytes) -> None:
        if key not in self.objects:
            bisect.insort(self._keys, key)
        self.objects[key] = body
        self._written_s[key] = self.now_s

    def remove(self, key: str) -> None:
        self._written_s.pop(key, None)
        if self.objects.pop(key, None) is not None:
            del self._keys[bisect.bisect_left(self._keys, key)]

    def put_back(self, objects: Mapping[str, bytes]) -> None:
        """Become an older copy of this map. What is on its way is lost: the server was stopped."""
        self._landing.clear()
        for key in self.objects.keys() - objects.keys():
            self.remove(key)
        for key in sorted(objects):
            if self.objects.get(key) != objects[key]:
                self.put(key, objects[key])

    def select(
        self, prefix: str, after: str = "", limit: int | None = None, *, stale_s: float = 0.0, ages: bool = False
    ) -> Listing:
        """Objects under `prefix` after the key `after`, in key order; with `stale_s` the objects of that long ago."""
        if stale_s and self.trace:
            return self._select_past(prefix, after, limit, self.trace[-1].time_us - round(stale_s * 1e6), ages=ages)
        start = bisect.bisect_left(self._keys, prefix)
        if after >= prefix:
            start = bisect.bisect_right(self._keys, after)
        found: Listing = []
        for key in self._keys[start : None if limit is None else start + limit]:
            if not key.startswith(prefix):
                break
            age_s = self.now_s - self._written_s.get(key, -math.inf) if ages else 0.0
            found.append(Entry(key, len(self.objects[key]), age_s))
        return found

    def _select_past(self, prefix: str, after: str, limit: int | None, at_us: int, *, ages: bool) -> Listing:
        """The result of `select` at `at_us`. A key that is deleted twice appears once more, which is harmless."""
        found = {entry.key: entry for entry in self.select(prefix, after, ages=ages)}
        for event in takewhile(lambda event: event.time_us > at_us, reversed(self.trace)):
            for key in event.keys:
                if event.outcome in {"created", "put"}:
                    found.pop(key, None)
                elif event.verb == "delete" and event.outcome and key.startswith(prefix) and key > after:
                    found.setdefault(key, Entry(key, 0))
        return [found[key] for key in sorted(found)][:limit]
