"""Following a checkpoint directory: what appears is kept, what disappears is dropped, on every node the same.

Nodes that share the directory all watch it; whoever sees a change first writes it, and the others find it written. A
node acts on *changes* of what it sees, not on differences between its view and the record: a node whose network file
system shows it an old listing would otherwise undo what the others did. What was there at the start is the one
exception: a checkpoint the group keeps but that is no longer on disk was deleted while nobody watched.

A directory that vanishes as a whole is an accident (an unmounted volume), never "all checkpoints were deleted".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Final

import trio

from stepfs.checkpoints.formats import Found, Place, look
from stepfs.checkpoints.next_step import NextStep
from stepfs.consumers import Group
from stepfs.errors import AbsentError, StepfsError, StoreUnreachableError, UsageError
from stepfs.format.ids import Step
from stepfs.format.records import ConsumerRecord

_log = logging.getLogger("stepfs.checkpoints")

POLL_S: Final = 1.0
_FAILURES_TOLD: Final = 60

Look = Callable[[], Found]
Changed = Callable[[ConsumerRecord], None]


class Watch:
    """One node's view of the checkpoints of one group."""

    def __init__(
        self,
        group: Group,
        place: Place,
        next_step: NextStep,
        *,
        changed: Changed | None = None,
        look_at: Look | None = None,
    ) -> None:
        self._group = group
        self._next_step = next_step
        self._look = look_at or (lambda: look(place))
        self._changed = changed or (lambda _: None)
        self._threads = trio.CapacityLimiter(1)
        self._seen: frozenset[Step] | None = None  # None until the directory could be read once

    async def run(self, *, poll_s: float = POLL_S) -> None:
        """Look again and again; problems are logged and retried, never fatal to the mount."""
        warned = ""
        failures = 0  # in a row
        while True:
            try:
                await self.look_once()
                warned, failures = "", 0
            except AbsentError as error:
                _log.debug("%s", error)
            except StoreUnreachableError as error:
                failures += 1
                if failures == 1:
                    _log.info("checkpoint not recorded yet: %s", error)
                elif failures == _FAILURES_TOLD:
                    _log.warning("checkpoints have not been recorded %d times in a row: %s", failures, error)
            except StepfsError as error:
                if str(error) != warned:
                    _log.warning("checkpoint not recorded: %s", error)
                    warned = str(error)
            await trio.sleep(poll_s)

    async def last_look(self) -> str:
        """Record what changed since the last look, before the mount ends; '' or why that could not be done."""
        try:
            await self.look_once()
        except AbsentError as error:
            _log.debug("%s", error)
        except StepfsError as error:
            return str(error)
        return ""

    async def look_once(self) -> None:
        """Compare the directory with what was seen last and record the difference."""
        try:
            # A file system that hangs must not keep the mount from ending; a thread that hangs in it, no second one.
            found = await trio.to_thread.run_sync(self._look, abandon_on_cancel=True, limiter=self._threads)
        except OSError as error:
            # The trainer deletes an old one meanwhile, or a network file system hiccups. The whole look is repeated:
            # one that leaves out what it could not read would drop a checkpoint that is there.
            raise StoreUnreachableError(f"cannot read the checkpoints: {error}") from error
        now = frozenset(self._next_step(counter) for counter in found.complete)
        barred = frozenset(self._steps(found.barred))
        now |= barred & (self._seen or frozenset())  # known before, and nothing says that it went
        if now == self._seen:
            return
        record = await self._group.read()
        kept = frozenset(record.kept) if record is not None and not record.retired else frozenset[Step]()
        now |= barred & kept
        target = _follow(kept, self._seen, now)
        if target != kept:
            record = await self._group.replace(target)
            _log.info("group %r keeps %s", self._group.name, sorted(target))
            self._changed(record)
        self._seen = now

    def _steps(self, counters: Collection[int]) -> Iterator[Step]:
        """Next steps, of what need not be checkpoints at all."""
        for counter in counters:
            with suppress(UsageError):
                yield self._next_step(counter)


def _follow(kept: frozenset[Step], seen: frozenset[Step] | None, now: frozenset[Step]) -> frozenset[Step]:
    """What the group should keep, given what it keeps, what was seen last and what is seen now."""
    if seen is None:
        # A first, empty look proves nothing: the run may not have written its first checkpoint yet.
        return now or kept
    return (kept | (now - seen)) - (seen - now)
