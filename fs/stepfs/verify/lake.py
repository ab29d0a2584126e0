"""`verify`: is every committed byte there and right? Reads everything, trusts nothing but the log's checksums.

Each TGB object is read once, front to back, in windows of `WINDOW_BYTES`, by a bounded number of tasks with one
reused buffer each: memory is bounded whatever the lake holds, and one damaged object never stops the others. Besides
the slices, the header, footer and index of each object are held against the log, since recovery after a lost log
would rest on them. Rejected: HEAD requests (a store that lost bytes still answers them) and one GET per slice
(64 requests where 8 do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs.errors import CorruptError, UsageError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.log.reader import LogReader
from stepfs.store.api import Store
from stepfs.verify.tgb_check import TgbCheck

WINDOW_BYTES: Final = 8 << 20
TASKS: Final = 4
_ERRORS_MAX: Final = 10_000  # a lake that lost its data directory must not fill memory with complaints

OriginStore = Callable[[str], Store]  # the URL of a fork's parent → its store


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as committed. `step` or `slice` is None when it concerns more than one."""

    step: Step | None
    slice: int | None
    key: str
    problem: str


@dataclass(slots=True)
class Verification:
    """What was looked at, and what was wrong with it."""

    steps: int = 0
    slices: int = 0
    payload_bytes: int = 0
    errors: list[Damage] = field(default_factory=list)

    def damaged(self, *damages: Damage) -> None:
        self.errors += damages[: max(0, _ERRORS_MAX - len(self.errors))]


async def verify_lake(
    log: LogReader, *, origin_store: OriginStore, progress: Callable[[Verification], None] | None = None
) -> Verification:
    """Check all live steps as of now. Never raises `CorruptError`: damage is what it reports.

    Steps reclaimed while this runs are not missed: what they lack is no damage.
    """
    result = Verification()
    first, end = log.first_live_step, log.state.next_step
    stores = {0: log.store}
    for number, origin in enumerate(log.state.origins, start=1):
        stores[number] = origin_store(origin.url)
    send, receive = trio.open_memory_channel[StepEntry](TASKS)
    try:
        async with trio.open_nursery() as nursery, receive:
            for _ in range(TASKS):
                nursery.start_soon(_work, stores, receive.clone(), result, progress)
            async with send:
                await _feed(log, first, end, send, result)
    finally:
        with trio.CancelScope(shield=True):
            for number, store in stores.items():
                if number:
                    await store.aclose()
    if result.errors and await log.confirm():
        live = log.first_live_step
        result.errors = [d for d in result.errors if d.step is None or d.step >= live]
    result.errors.sort(key=lambda damage: (damage.step or 0, damage.slice or 0))
    return result


async def _feed(
    log: LogReader,
    first: Step,
    end: Step,
    send: trio.MemorySendChannel[StepEntry],
    result: Verification,
) -> None:
    """Send every entry; an unreadable index segment is one damage, and its steps cannot be checked."""
    number = first
    while number < end:
        try:
            entry = await log.entry(number)
        except CorruptError as error:
            segment = SegmentIndex(number // SEGMENT_STEPS)
            past = Step(min(end, (segment + 1) * SEGMENT_STEPS))
            result.damaged(Damage(None, None, "", f"steps {number}…{past - 1} cannot be checked: {error}"))
            number = past
            continue
        await send.send(entry)
        number = Step(number + 1)


async def _work(
    stores: dict[int, Store],
    receive: trio.MemoryReceiveChannel[StepEntry],
    result: Verification,
    progress: Callable[[Verification], None] | None,
) -> None:
    window = memoryview(bytearray(WINDOW_BYTES))
    async with receive:
        async for entry in receive:
            damages = await _verify_object(stores[entry.tgb.origin], entry, window)
            result.steps += 1
            result.slices += entry.tgb.slices
            result.payload_bytes += entry.tgb.payload_bytes
            result.damaged(*damages)
            if progress is not None:
                progress(result)


async def _verify_object(store: Store, entry: StepEntry, window: memoryview) -> list[Damage]:
    """One TGB, front to back."""
    tgb = entry.tgb
    check = TgbCheck(tgb)
    offset = 0
    while offset < tgb.size:
        size = min(len(window), tgb.size - offset)
        try:
            got = await store.read_into(tgb.key, offset, window[:size])
        except UsageError as error:  # the log names a key that no store would accept
            return [Damage(entry.step, None, tgb.key, str(error))]
        if got is None:
            return [Damage(entry.step, None, tgb.key, "the object is missing")]
        await trio.to_thread.run_sync(check.feed, window[:got])
        if got < size:
            return [
                Damage(entry.step, None, tgb.key, f"the object ends at byte {offset + got} of {tgb.size}")
            ]
        offset += got
    return [Damage(entry.step, index, tgb.key, problem) for index, problem in check.finish()]
