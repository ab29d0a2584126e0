"""The orders that trainers announced, and where their readers are in them. Plain state, no I/O.

A hint is advice. It makes no bytes readable and none unreadable, waits for no step, and is forgotten when nothing it
named has been opened for `EXPIRES_S`. Only opens move a place forward: loaders open some steps before their
turn, so the places just behind the front stay requested, and a step far ahead of it belongs to another reader.

The first step of an unfinished order does not expire: a checkpoint taken in the middle of it needs steps
from there on (`needed_from`), until the order ends, is replaced, or is taken back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from stepfs.data.prefetch.order import EVIDENCE_STEPS, usual_slices
from stepfs.data.prefetch.order_hint import Hint, ListedOrder, NoHint, Order, ShuffleHint, StepsHint
from stepfs.data.prefetch.window import Plan
from stepfs.errors import UsageError
from stepfs.format.ids import SliceIndex, Step

EXPIRES_S: Final = 600.0
STREAMS_MAX: Final = 64
_BEHIND_PLACES: Final = 64  # skipped ones so little behind the front are still to come
_JUMP_PLACES: Final = 128  # a loader's workers run no further ahead


class HintedStream:
    """Readers of one order."""

    def __init__(self, order: Order, at: int, now: float) -> None:
        self.order = order
        self.touched_at = now
        self.front = at  # one past the greatest place opened
        self._start = at  # earlier places are never opened
        self._opened: OrderedDict[int, set[SliceIndex]] = OrderedDict()  # by place
        self._steps: dict[int, Step] = {}  # by place, those near the front: computing one takes microseconds

    @property
    def settled(self) -> bool:
        """Whether readers are so far in it that they have left the order before."""
        return self.ended or self.front - self._start > _JUMP_PLACES

    @property
    def ended(self) -> bool:
        return self.front >= len(self.order)

    def move(self, at: int, now: float) -> None:
        """Note the place that the trainer announced: at a beginning, when it resumes, or once more."""
        self.touched_at = now
        once_more = max(self._start, self.front - _JUMP_PLACES) <= at <= self.front + _JUMP_PLACES
        if not once_more or (self.ended and at == self._start):
            self.front = self._start = at
            self._opened.clear()

    def note_open(self, step: Step, index: SliceIndex, now: float) -> bool | None:
        """None unless the step is one that these readers are about to open; True if it is the first file of it."""
        near = self.order.places_of(step, max(self._start, self.front - _BEHIND_PLACES), self.front + _JUMP_PLACES)
        if not near:
            return None
        place = next((place for place in near if index not in self._opened.get(place, ())), near[0])
        fresh = place not in self._opened
        self.touched_at = now
        self.front = max(self.front, place + 1)
        self._opened.setdefault(place, set()).add(index)
        for old in [old for old in self._opened if old < self.front - 2 * _BEHIND_PLACES]:
            del self._opened[old]
        return fresh

    def slices(self) -> frozenset[SliceIndex]:
        return usual_slices(list(self._opened.values())[-EVIDENCE_STEPS:])

    def ahead(self, window: int, slices: frozenset[SliceIndex]) -> list[tuple[int, Step, set[SliceIndex]]]:
        """(places ahead, step, slices that were not opened yet), nearest first."""
        first = max(self._start, self.front - _BEHIND_PLACES)
        found = []
        stop = min(self.front + window, len(self.order))
        known = self._steps
        self._steps = {place: known.get(place) or self.order.step_at(place) for place in range(first, stop)}
        for place, step in self._steps.items():
            missing = slices.difference(self._opened.get(place, ()))
            if missing:
                found.append((max(0, place - self.front), step, set(missing)))
        return found


class HintedStreams:
    """The hinted readers of one mount."""

    def __init__(self) -> None:
        self._streams: list[HintedStream] = []
        self._usual: frozenset[SliceIndex] = frozenset()  # the slices that hinted readers opened last

    def accept(self, hint: Hint, now: float) -> None:
        """`UsageError` for a part of a list whose earlier part is missing, or for too much."""
        if isinstance(hint, NoHint):
            self._streams.clear()
        elif isinstance(hint, ShuffleHint):
            self._move_to(hint.order, hint.at, now)
        else:
            self._extend(hint, now)

    def note_open(self, step: Step, index: SliceIndex, now: float) -> bool | None:
        """None unless the step was announced; True if it is the first file of it."""
        matched: bool | None = None
        for stream in list(self._streams):
            fresh = stream.note_open(step, index, now)
            if fresh is None:
                continue
            matched = bool(matched) or fresh
            self._usual = stream.slices() or self._usual
            if stream.settled:
                self._drop_before(stream)
        return matched

    def plan(
        self,
        *,
        hinted: frozenset[SliceIndex],
        window_of: Callable[[int], int],
        first: Step,
        frontier: Step,
        now: float,
    ) -> Plan:
        """Announced steps of [first, frontier] that will be opened next, nearest first. `window_of` says how many
        steps ahead for so many slices a step."""
        live = [s for s in self._streams if not s.ended and now - s.touched_at < EXPIRES_S]
        slices = {id(stream): hinted or stream.slices() or self._usual for stream in live}
        wanted = sum(map(len, slices.values()))
        if not wanted:
            return []
        window = window_of(wanted)
        places: dict[Step, int] = {}
        missing: dict[Step, set[SliceIndex]] = {}
        for stream in live:
            for distance, step, indices in stream.ahead(window, slices[id(stream)]):
                if first <= step <= frontier:
                    places[step] = min(distance, places.get(step, distance))
                    missing.setdefault(step, set()).update(indices)
        return [(step, tuple(sorted(missing[step]))) for step in sorted(missing, key=lambda step: places[step])]

    def ended(self, now: float) -> bool:
        """Whether readers came to the end of an order a short while ago: they may not begin at the first step again."""
        return any(stream.ended and now - stream.touched_at < EXPIRES_S for stream in self._streams)

    def needed_from(self) -> Step | None:
        """The least step that an unfinished order began with; None without one."""
        return min((stream.order.lowest for stream in self._streams if not stream.ended), default=None)

    def describe(self) -> list[dict[str, int]]:
        """For the control file: per order its length and the place of its readers."""
        return [
            {"steps": len(stream.order), "at": stream.front, "lowest": stream.order.lowest} for stream in self._streams
        ]

    def _drop_before(self, stream: HintedStream) -> None:
        """Forget the epochs of the same readers that were announced before."""
        place = self._streams.index(stream)
        kept = [old for old in self._streams[:place] if not stream.order.follows(old.order)]
        self._streams = kept + self._streams[place:]

    def _move_to(self, order: Order, at: int, now: float) -> None:
        for stream in self._streams:
            if stream.order == order:
                stream.move(at, now)
                return
        # An epoch begins while the last steps of the one before are still being opened.
        followed = [stream for stream in self._streams if order.follows(stream.order)]
        for stream in followed[:-1] if at == 0 else followed:
            self._streams.remove(stream)
        self._add(HintedStream(order, at, now))

    def _extend(self, hint: StepsHint, now: float) -> None:
        listed = [stream for stream in self._streams if isinstance(stream.order, ListedOrder)]
        if hint.at == 0:
            for stream in listed:
                self._streams.remove(stream)
            self._add(HintedStream(ListedOrder(hint.steps), 0, now))
            return
        order = listed[0].order if listed else ListedOrder()
        assert isinstance(order, ListedOrder)
        if len(order) < hint.at:
            raise UsageError(f"the steps before place {hint.at} were not announced; begin at 0")
        known = order.part(hint.at, len(hint.steps))  # the kernel may look one name up twice
        if known != list(hint.steps[: len(known)]):
            raise UsageError(f"other steps were announced from place {hint.at} on; begin at 0")
        order.extend(hint.steps[len(known) :])
        listed[0].touched_at = now

    def _add(self, stream: HintedStream) -> None:
        self._streams.append(stream)
        if len(self._streams) > STREAMS_MAX:
            self._streams.remove(min(self._streams, key=lambda stream: stream.touched_at))
