"""A store in memory, in virtual time, that fails on purpose: the base of the simulator.

`ObjectMap` holds the durable objects, strongly consistent and shared by every simulated process; a `FaultyStore` is
one process's access to it, with its own faults, randomness and counts. Under `trio.testing.MockClock` with
deterministic scheduling the same seeds give the same trace.

Two awaits may be cancelled: the request on its way (then it may be applied later, or never) and the answer on its way
(then the request was applied). Applying itself never yields.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence

import trio

from doubles.faults import RESET_BEFORE, THROTTLED_503, Fault, Plan, Told, no_faults
from doubles.object_map import Event, Listing, ObjectMap
from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.store.api import (
    DELETE_RESENT_S_MAX,
    Buffer,
    Counts,
    Progress,
    Put,
    check_key,
    check_prefix,
    ignore_progress,
)

__all__ = ["ATTEMPTS_MAX", "DELETE_BATCH", "Event", "FaultyStore", "ObjectMap", "usual_latency"]

ATTEMPTS_MAX = 3  # of verbs that are retried, as the S3 data client does
DELETE_BATCH = 1000
_RETRY_S = 0.2
_WIRE_LANDS = 0.5  # share of requests of a killed process that are applied nevertheless
_WIRE_S_MAX = 2.0
_HALF_GOES = 0.5

Latency = Callable[[str, int, random.Random], float]  # (verb, bytes, randomness) → seconds there and back


def usual_latency(verb: str, size: int, rng: random.Random) -> float:
    """The latency of a typical server: 2 ms a request, 8 ms a create, 1 GB/s; with jitter."""
    base_s = 0.008 if verb == "create" else 0.002
    return base_s * rng.uniform(0.5, 2.0) + size / 1e9


class FaultyStore:
    """`stepfs.store.api.Store` of the simulated process `actor` over a shared `ObjectMap`.

    To kill the process at a chosen await, set `kill_at` to a number of pauses and `kill` to its cancel scope's
    `cancel`; `pauses` counts them.
    """

    def __init__(
        self,
        shared: ObjectMap | None = None,
        *,
        actor: str = "main",
        plan: Plan = no_faults,
        seed: int = 0,
        latency: Latency = usual_latency,
        page: int | None = None,
    ) -> None:
        """`page`: the number of keys that one request lists or deletes; by default a LIST is one request, a delete
        1000 keys.
        """
        self.shared = shared if shared is not None else ObjectMap()
        self.url = f"memory://{actor}"
        self.counts = Counts()
        self.plan = plan
        self.pauses = 0
        self.kill_at: int | None = None
        self.kill: Callable[[], None] = _nobody
        self._actor = actor
        self._latency = latency
        self._page = page
        self._fault: Fault | None = None  # of the request that is being applied
        self._rng = random.Random(f"{seed}/{actor}")

    async def get(self, key: str, *, bytes_max: int = 256 << 20) -> bytes | None:
        body = await self._read(check_key(key))
        if body is not None and len(body) > bytes_max:
            raise CorruptError(f"{self.url}/{key} has {len(body)} bytes, at most {bytes_max} make sense")
        self.counts.bytes_read += len(body or b"")
        return body

    async def read_into(
        self, key: str, offset: int, buffer: memoryview, landed: Progress = ignore_progress
    ) -> int | None:
        body = await self._read(check_key(key), len(buffer))
        if body is None:
            return None
        piece = body[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        landed(len(piece))
        self.counts.bytes_read += len(piece)
        return len(piece)

    async def create(self, key: str, body: bytes) -> Put:
        check_key(key)

        def effect() -> str:
            if key in self.shared.objects:
                return "exists"
            self.shared.put(key, bytes(body))
            return "created"

        told, outcome = await self._attempt("create", (key,), effect, len(body), zlib.crc32(body))
        self.counts.bytes_written += len(body)
        match told:
            case Told.TRUTH:
                return Put(outcome)
            case Told.CONFLICT:
                return Put.RETRY
            case Told.TAKEN:
                return Put.EXISTS
            case _:
                return Put.UNKNOWN

    async def put(self, key: str, parts: Sequence[Buffer], *, crc32c: int | None = None) -> None:
        del crc32c
        check_key(key)
        body = b"".join(bytes(part) for part in parts)

        def effect() -> str:
            self.shared.put(key, body)
            return "put"

        await self._retried("put", (key,), effect, len(body), zlib.crc32(body))
        self.counts.bytes_written += len(body)

    async def list(self, prefix: str, *, after: str = "", limit: int | None = None, ages: bool = False) -> Listing:
        check_prefix(prefix)
        found: Listing = []
        while limit is None or len(found) < limit:
            size = min((n for n in (self._page, limit and limit - len(found)) if n is not None), default=None)
            page = await self._list_page(prefix, found[-1].key if found else after, size, ages=ages)
            found += page
            if size is None or len(page) < size:
                break
        return found

    async def _list_page(self, prefix: str, after: str, limit: int | None, *, ages: bool) -> Listing:
        page: Listing = []

        def effect() -> str:
            stale_s = self._fault.stale_s if self._fault is not None else 0.0
            page[:] = self.shared.select(prefix, after, limit, stale_s=stale_s, ages=ages)
            return f"{len(page)} keys"

        await self._retried("list", (prefix,), effect)
        return page

    async def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        size = self._page or DELETE_BATCH
        for start in range(0, len(names), size):
            batch = names[start : start + size]

            def effect(batch: Sequence[str] = batch) -> str:
                half = self._fault is not None and self._fault.half
                for name in batch:
                    if not half or self._rng.random() < _HALF_GOES:
                        self.shared.remove(name)
                return f"{len(batch)} keys"

            await self._retried("delete", tuple(batch), effect)

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _read(self, key: str, size: int = 0) -> bytes | None:
        found: bytes | None = None

        def effect() -> str:
            nonlocal found
            found = self.shared.objects.get(key)
            return "absent" if found is None else f"{len(found)} bytes"

        told = await self._retried("get", (key,), effect, size)
        return None if told is Told.ABSENT else found

    async def _retried(
        self, verb: str, keys: tuple[str, ...], effect: Callable[[], str], size: int = 0, crc: int = 0
    ) -> Told:
        began_s = trio.current_time()
        for attempt in range(1, ATTEMPTS_MAX + 1):
            told, _ = await self._attempt(verb, keys, effect, size, crc)
            if told is not Told.NOTHING:
                return told
            if verb == "delete" and trio.current_time() - began_s > DELETE_RESENT_S_MAX:
                break
            await self._pause(attempt * _RETRY_S * self._rng.uniform(0.5, 1.0))
        raise StoreUnreachableError(f"{self.url}: no answer to {verb} {keys[0]}; check the network and retry")

    async def _attempt(
        self, verb: str, keys: tuple[str, ...], effect: Callable[[], str], size: int, crc: int
    ) -> tuple[Told, str]:
        counts, rng = self.counts, self._rng
        if counts.keys is None:
            setattr(counts, verb, getattr(counts, verb) + 1)  # `note`, without its lock
        else:
            counts.note(verb, *keys)
        fault = self.plan(verb, keys[0], rng)
        counts.throttled += fault is THROTTLED_503
        travel_s = self._latency(verb, size, rng) / 2
        try:
            await self._pause(travel_s)
        except trio.Cancelled:
            if rng.random() < _WIRE_LANDS:
                self._land_later(rng.uniform(0.0, _WIRE_S_MAX), verb, keys, effect, crc)
            raise
        now_s = trio.current_time()
        self.shared.settle(now_s)
        if now_s < self.shared.away_until_s:
            fault = RESET_BEFORE
        if fault is None:
            outcome = effect()
            self._note(now_s, verb, keys, outcome, "", crc)
            await self._pause(travel_s)
            return Told.TRUTH, outcome
        self._fault = fault
        outcome = effect() if fault.applied else ""
        self._fault = None
        self._note(now_s, verb, keys, outcome or "not applied", fault.name, crc)
        if fault.late_s is not None:
            self._land_later(fault.late_s, verb, keys, effect, crc)
        await self._pause(travel_s + fault.wait_s)
        return fault.told, outcome

    def _note(self, time_s: float, verb: str, keys: tuple[str, ...], outcome: str, wrong: str, crc: int) -> None:
        self.shared.note(Event(round(time_s * 1e6), self._actor, verb, keys, outcome, wrong, crc))

    def _land_later(
        self, after_s: float, verb: str, keys: tuple[str, ...], effect: Callable[[], str], crc: int
    ) -> None:
        if verb in {"create", "put", "delete"}:
            self.shared.land_at(
                trio.current_time() + after_s,
                lambda time_s: self._note(time_s, verb, keys, effect(), "landed late", crc),
            )

    async def _pause(self, seconds: float) -> None:
        self.pauses += 1
        if self.pauses == self.kill_at:
            self.kill()
        await trio.sleep(seconds)


def _nobody() -> None:
    """Kills nobody."""
