"""`verify`: does every committed byte exist, unchanged? Reads everything, trusts only the log's checksums.

Each TGB object is read once, front to back, in windows of `WINDOW_BYTES`, by a bounded number of tasks with one
reused buffer each: memory is bounded for any lake, and one damaged object never stops the check of the others. Besides
the slices, the header, footer and index of each object are compared with the log, because a recovery after a lost log
would depend on them. Rejected: HEAD requests (a store that lost bytes still answers them) and one GET per slice (64
requests in place of 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs.errors import CorruptError, ReclaimedError, RefusedError, StoreUnreachableError, UsageError
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginLostError, OriginStores
from stepfs.lake.verify.tgb_check import TgbCheck

WINDOW_BYTES: Final = 8 << 20
TASKS: Final = 4
_UNREAD_MAX: Final = 2 * TASKS  # objects in a row; beyond that the store is at fault
_ERRORS_MAX: Final = 10_000  # a lake that lost its data directory must not fill memory with errors


STRAY: Final = "stands far behind all others, and no stepfs wrote it there"


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference from the committed contents. `step` or `slice` is None when it concerns more than one."""

    step: Step | None
    slice: int | None
    key: str
    problem: str


@dataclass(slots=True)
class Verification:
    """The checked amounts, and the damage found."""

    steps: int = 0
    slices: int = 0
    payload_bytes: int = 0
    errors: list[Damage] = field(default_factory=list)

    def damaged(self, *damages: Damage) -> None:
        self.errors += damages[: max(0, _ERRORS_MAX - len(self.errors))]


async def verify_lake(
    log: LogReader,
    *,
    origins: OriginStores,
    progress: Callable[[Verification], None] | None = None,
    content: str = "",
) -> Verification:
    """Check all steps that are live now. Never raises `CorruptError`: the result lists damage.

    Steps that are reclaimed meanwhile count as no damage. An unreadable object is damaged if other objects of its
    store can be read. If none can, the store is at fault: `StoreUnreachableError` or `RefusedError`. `content`: a slice
    without the signature of this extension is damage, too.
    """
    scan = _Scan(log, origins, progress or (lambda _: None), content)
    await scan.run(log.first_live_step, log.state.next_step)
    await scan.retry()
    result = scan.result
    if result.errors and await log.confirm():
        live = log.first_live_step
        result.errors = [d for d in result.errors if d.step is None or d.step >= live]
    result.errors.sort(key=lambda damage: (damage.step or 0, damage.slice or 0))
    return result


class _Scan:
    """One pass over all objects; `result` grows."""

    def __init__(
        self,
        log: LogReader,
        origins: OriginStores,
        progress: Callable[[Verification], None],
        content: str,
    ) -> None:
        self._content = content
        self.result = Verification()
        self._log = log
        self._origins = origins
        self._progress = progress
        self._unread: list[StepEntry] = []
        self._unread_in_a_row = 0
        self._lost: dict[int, tuple[OriginLostError, list[Step]]] = {}  # by origin: the steps that only it has
        self._answered: set[int] = set()  # origins whose store has answered

    async def run(self, first: Step, end: Step) -> None:
        send, receive = trio.open_memory_channel[StepEntry](TASKS)
        async with trio.open_nursery() as nursery, receive:
            for _ in range(TASKS):
                nursery.start_soon(self._work, receive.clone())
            async with send:
                await self._feed(first, end, send)

    async def retry(self) -> None:
        """Read unreadable objects once more, if their store has answered for others. A lost origin is one damage."""
        for error, steps in self._lost.values():
            problem = f"{len(steps)} steps from {min(steps)} to {max(steps)} cannot be checked: {error}"
            self.result.damaged(Damage(None, None, "", problem))
        if not self._unread:
            return
        await self._log.confirm()
        window = memoryview(bytearray(WINDOW_BYTES))
        for entry in self._unread:
            try:
                damages = await self._verify_object(entry, window)
            except (RefusedError, StoreUnreachableError) as error:
                if entry.tgb.origin not in self._answered:
                    raise
                damages = [Damage(entry.step, None, entry.tgb.key, f"cannot be read: {error}")]
            self._seen(entry, damages)

    async def _feed(self, first: Step, end: Step, send: trio.MemorySendChannel[StepEntry]) -> None:
        """Send every entry; an unreadable index segment is one damage, and its steps cannot be checked."""
        number = first
        while number < end:
            try:
                entry = await self._log.entry(number)
            except (CorruptError, ReclaimedError) as error:
                await self._log.confirm()
                if self._log.first_live_step > number:  # reclaimed meanwhile, and perhaps its segment as well
                    number = self._log.first_live_step
                    continue
                segment = SegmentIndex(number // SEGMENT_STEPS)
                past = Step(min(end, (segment + 1) * SEGMENT_STEPS))
                problem = f"steps {number}…{past - 1} cannot be checked: {error}"
                self.result.damaged(Damage(None, None, "", problem))
                number = past
                continue
            await send.send(entry)
            number = Step(number + 1)

    async def _work(self, receive: trio.MemoryReceiveChannel[StepEntry]) -> None:
        window = memoryview(bytearray(WINDOW_BYTES))
        async with receive:
            async for entry in receive:
                try:
                    damages = await self._verify_object(entry, window)
                except OriginLostError as error:
                    self._lost.setdefault(entry.tgb.origin, (error, []))[1].append(entry.step)
                    continue
                except (RefusedError, StoreUnreachableError):
                    self._unread.append(entry)
                    self._unread_in_a_row += 1
                    if self._unread_in_a_row > _UNREAD_MAX:
                        raise
                    continue
                self._unread_in_a_row = 0
                self._answered.add(entry.tgb.origin)
                self._seen(entry, damages)

    async def _verify_object(self, entry: StepEntry, window: memoryview) -> list[Damage]:
        """One TGB, front to back."""
        tgb, store = entry.tgb, await self._origins.of(entry.tgb, self._log.state)
        check = TgbCheck(tgb, content=self._content)
        offset = 0
        while offset < tgb.size:
            size = min(len(window), tgb.size - offset)
            try:
                got = await store.read_into(tgb.key, offset, window[:size])
            except UsageError as error:  # the log names an invalid key
                return [Damage(entry.step, None, tgb.key, str(error))]
            if got is None:
                return [Damage(entry.step, None, tgb.key, "the object is missing")]
            await trio.to_thread.run_sync(check.feed, window[:got])
            if got < size:
                return [Damage(entry.step, None, tgb.key, f"the object ends at byte {offset + got} of {tgb.size}")]
            offset += got
        return [Damage(entry.step, index, tgb.key, problem) for index, problem in check.finish()]

    def _seen(self, entry: StepEntry, damages: list[Damage]) -> None:
        self.result.steps += 1
        self.result.slices += entry.tgb.slices
        self.result.payload_bytes += entry.tgb.payload_bytes
        self.result.damaged(*damages)
        self._progress(self.result)
