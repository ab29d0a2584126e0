"""The orders that trainers announce by names in `.stepfs/order/` (SEMANTICS 29 to 31), and where their readers are.

A hint is advice: it makes no bytes readable, waits for no step, and is forgotten when nothing that it named was opened for
`EXPIRES_S`. The first step of an unfinished order stays: a checkpoint in the middle of it needs steps from there on.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import re
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from stepfs.data.access_pattern import EVIDENCE_STEPS, STATE_FILES_MAX, Plan, usual_slices
from stepfs.errors import UsageError
from stepfs.format.ids import INTEGER_MAX, SliceIndex, Step

_ROUNDS: Final = 6
_MASK: Final = (1 << 64) - 1

LISTED_STEPS_MAX: Final = 1 << 17
_NAME_BYTES_MAX: Final = 255
_NUMBER: Final = "(0|[1-9][0-9]{0,15})"
_SHUFFLE: Final = re.compile("1-shuffle" + f"-{_NUMBER}" * 7)
_STEPS: Final = re.compile(f"1-steps-{_NUMBER}-([A-Za-z0-9_-]+)")
_NONE: Final = "1-none"

EXPIRES_S: Final = 600.0
STREAMS_MAX: Final = 64
_BEHIND_PLACES: Final = 64  # skipped ones so little behind the front are still to come
_JUMP_PLACES: Final = 128  # a loader's workers run no further ahead
_FRONT_PLACES: Final = 32  # by which a front on record lags: so little that the next daemon finds its readers

_NAME: Final = re.compile("([0-9]{1,16})(?:/([0-9]{1,16}))?")


class Permutation:
    """A bijection of [0, count) to itself."""

    def __init__(self, count: int, *, seed: int, epoch: int) -> None:
        assert count > 0
        self.count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        name = f"stepfs shuffle 1 {seed} {epoch} {count}".encode()
        digest = hashlib.blake2b(name, digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)]

    def value_at(self, place: int) -> int:
        assert 0 <= place < self.count
        value = self._forth(place)
        while value >= self.count:
            value = self._forth(value)
        return value

    def place_of(self, value: int) -> int:
        """Inverse of `value_at`."""
        assert 0 <= value < self.count
        place = self._back(value)
        while place >= self.count:
            place = self._back(place)
        return place

    def _forth(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right

    def _back(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in reversed(self._keys):
            left, right = right ^ (_mix(left ^ key) & self._half_mask), left
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@dataclass(frozen=True)
class ShuffledOrder:
    """Steps [first, stop) in the order of a seed and an epoch; of these every `shards`-th, from `shard` on."""

    seed: int
    epoch: int
    first: Step
    stop: Step
    shard: int = 0
    shards: int = 1

    @cached_property
    def _permutation(self) -> Permutation:
        return Permutation(self.stop - self.first, seed=self.seed, epoch=self.epoch)

    def __len__(self) -> int:
        return max(0, -(-(self.stop - self.first - self.shard) // self.shards))

    @property
    def lowest(self) -> Step:
        """The first step that is needed until all of them were opened."""
        return self.first

    def step_at(self, place: int) -> Step:
        return Step(self.first + self._permutation.value_at(place * self.shards + self.shard))

    def places_of(self, step: Step, first: int, stop: int) -> list[int]:
        """The places of the step among these."""
        return _among(self.place_of(step), first, stop)

    def place_of(self, step: Step) -> int | None:
        """None if the step is not part of this order."""
        if not self.first <= step < self.stop:
            return None
        place, shard = divmod(self._permutation.place_of(step - self.first), self.shards)
        return place if shard == self.shard else None

    def dealt(self, place: int, workers: int) -> tuple[ShuffledOrder, int]:
        """The order of the one of a loader's `workers` that reads this place, every `workers`-th, and its place there."""
        shard = place % workers * self.shards + self.shard
        return replace(self, shard=shard, shards=workers * self.shards), place // workers

    def follows(self, other: Order) -> bool:
        """Whether this is another epoch of the same readers."""
        return isinstance(other, ShuffledOrder) and replace(other, seed=self.seed, epoch=self.epoch) == self


@dataclass(frozen=True)
class StridedOrder:
    """Steps in order, from `first` on: `block` of every `period` steps, as one of several loader processes reads them.

    `turn` tells one pass over them from the next. No file name announces it: it is for readers in this process.
    """

    first: Step
    stop: Step
    block: int = 1
    period: int = 1
    turn: int = 0

    def __len__(self) -> int:
        periods, rest = divmod(max(0, self.stop - self.first), self.period)
        return periods * self.block + min(rest, self.block)

    @property
    def lowest(self) -> Step:
        """The first step. No checkpoint asks for it, because steps in order release each other."""
        return self.first

    def step_at(self, place: int) -> Step:
        periods, rest = divmod(place, self.block)
        return Step(self.first + periods * self.period + rest)

    def places_of(self, step: Step, first: int, stop: int) -> list[int]:
        """The places of the step among these."""
        return _among(self.place_of(step), first, stop)

    def place_of(self, step: Step) -> int | None:
        if not self.first <= step < self.stop:
            return None
        periods, rest = divmod(step - self.first, self.period)
        return periods * self.block + rest if rest < self.block else None

    def follows(self, other: Order) -> bool:
        """Whether this is another pass of the same readers."""
        return isinstance(other, StridedOrder) and replace(other, first=self.first, turn=self.turn) == self


class ListedOrder:
    """The announced step numbers, in that order. A step may be there several times: epochs, draws with replacement."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._steps = array("Q")
        self._places: dict[int, array[int]] = {}
        self._names: tuple[int, list[str]] = (0, [])  # those of so many steps
        self.extend(steps)

    def extend(self, steps: Iterable[Step]) -> None:
        """`UsageError` beyond `LISTED_STEPS_MAX`."""
        for step in steps:
            if len(self._steps) >= LISTED_STEPS_MAX:
                raise UsageError(f"an order lists at most {LISTED_STEPS_MAX} steps")
            self._places.setdefault(step, array("I")).append(len(self._steps))
            self._steps.append(step)

    def steps(self) -> list[Step]:
        return self.part(0, len(self))

    def names(self) -> list[str]:
        """Those that announce it; half a second for the longest list, once."""
        if self._names[0] != len(self):
            self._names = len(self), [*steps_names(self.steps())]
        return self._names[1]

    def part(self, at: int, count: int) -> list[Step]:
        """The steps at these places, as far as the list goes."""
        return [Step(step) for step in self._steps[at : at + count]]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def lowest(self) -> Step:
        return Step(min(self._steps, default=0))

    def step_at(self, place: int) -> Step:
        return Step(self._steps[place])

    def places_of(self, step: Step, first: int, stop: int) -> list[int]:
        """The places of the step among these."""
        places = self._places.get(step, array("I"))
        return list(places[bisect_left(places, first) : bisect_left(places, stop)])

    def follows(self, other: Order) -> bool:
        return isinstance(other, ListedOrder)


Order = ShuffledOrder | StridedOrder | ListedOrder


def _among(place: int | None, first: int, stop: int) -> list[int]:
    return [place] if place is not None and first <= place < stop else []


@dataclass(frozen=True, slots=True)
class ShuffleHint:
    """Readers are at place `at` of an order that is computed."""

    order: ShuffledOrder | StridedOrder
    at: int


@dataclass(frozen=True, slots=True)
class StepsHint:
    """These steps fill places `at` and following of a list; `at` 0 begins a new one."""

    at: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class NoHint:
    """Earlier hints are void."""


Hint = ShuffleHint | StepsHint | NoHint


def parse_hint(name: str) -> Hint:
    """The meaning of a file name; `UsageError` for anything else."""
    if name == _NONE:
        return NoHint()
    if (match := _SHUFFLE.fullmatch(name)) is not None:
        seed, epoch, first, stop, shard, shards, at = map(int, match.groups())
        order = ShuffledOrder(seed, epoch, Step(first), Step(stop), shard, shards)
        if not first < stop <= INTEGER_MAX or not shard < shards <= INTEGER_MAX or at > len(order):
            raise UsageError(f"{name}: no such steps, shard or place")
        return ShuffleHint(order, at)
    if (match := _STEPS.fullmatch(name)) is not None:
        return StepsHint(int(match[1]), tuple(_unpack(match[2], name)))
    raise UsageError(f"{name}: not an order hint of version 1")


def shuffle_name(order: ShuffledOrder, at: int) -> str:
    """The file name that announces the place of readers in a shuffled order."""
    numbers = order.seed, order.epoch, order.first, order.stop, order.shard, order.shards, at
    return "-".join(["1-shuffle", *map(str, numbers)])


def steps_names(steps: Iterable[Step]) -> Iterator[str]:
    """The file names that announce a list of steps, to be looked up in this order."""
    at, before, packed, count = 0, 0, bytearray(), 0
    for step in steps:
        word = _varint(_zigzag(step - before))
        if packed and len(_steps_name(at, packed + word)) > _NAME_BYTES_MAX:
            yield _steps_name(at, packed)
            at, count, packed = at + count, 0, bytearray()
            word = _varint(_zigzag(step))
        packed, before, count = packed + word, step, count + 1
    if packed:
        yield _steps_name(at, packed)


def _steps_name(at: int, packed: bytes | bytearray) -> str:
    return f"1-steps-{at}-{base64.urlsafe_b64encode(packed).decode().rstrip('=')}"


def _unpack(data: str, name: str) -> Iterator[Step]:
    try:
        packed = base64.urlsafe_b64decode(data + "=" * (-len(data) % 4))
    except (ValueError, binascii.Error) as error:
        raise UsageError(f"{name}: not base64") from error
    step = value = shift = 0
    for byte in packed:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            continue
        step += (value >> 1) ^ -(value & 1)
        if not 0 <= step <= INTEGER_MAX:
            raise UsageError(f"{name}: names step {step}")
        yield Step(step)
        value = shift = 0
    if shift:
        raise UsageError(f"{name}: is cut off")


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def _varint(number: int) -> bytes:
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


class HintedStream:
    """Readers of one order."""

    def __init__(self, order: Order, at: int, now: float, number: int = 0) -> None:
        self.order = order
        self.touched_at = now
        self.front = at  # one past the greatest place opened
        self._start = at  # earlier places are never opened
        self._opened: OrderedDict[int, set[SliceIndex]] = OrderedDict()  # by place
        self._steps: dict[int, Step] = {}  # by place, those near the front: computing one takes microseconds
        self.number = number
        # On record, for the next daemon of the mount:
        self._front_decided, self._end_decided = -_FRONT_PLACES, False
        self._listed_decided = 0
        self._names_decided: list[str] = []

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
            self._front_decided = -_FRONT_PLACES

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

    def near(self) -> list[list[int]]:
        """What was opened near the front: places, each with slices; for the next daemon."""
        found, room = list[list[int]](), STATE_FILES_MAX
        for place in reversed(self._opened):
            found.append([place, *itertools.islice(self._opened[place], room)])
            room -= len(found[-1]) - 1
            if room <= 0:
                break
        return found[::-1]

    def inherit(self, front: int, near: Iterable[Sequence[int]]) -> None:
        """Readers are at `front`, as far as is known."""
        self._opened = OrderedDict((place, set(map(SliceIndex, seen))) for place, *seen in filter(None, near) if seen)
        self.front = min(max([front, self._start, *(place + 1 for place in self._opened)]), len(self.order))

    @property
    def lags(self) -> bool:
        """Whether the record of it does, by more than a daemon that follows may miss."""
        return self.ended != self._end_decided or abs(self.front - self._front_decided) >= _FRONT_PLACES

    def undecided(self, *, exact: bool = False) -> dict[str, object]:
        """What is to be put on record of it, under which names."""
        order, at, found = self.order, self._listed_decided, dict[str, object]()
        if isinstance(order, ListedOrder) and at < len(order):
            found[f"{self.number}/{at}"] = {"steps": order.part(at, len(order) - at)}
            self._names_decided.append(f"{self.number}/{at}")
            self._listed_decided = len(order)
        if found or self.lags or (exact and self.front != self._front_decided):
            name = shuffle_name(order, self._start) if isinstance(order, ShuffledOrder) else ""
            found[f"{self.number}"] = {"name": name, "front": self.front, "start": self._start}
            self._front_decided, self._end_decided = self.front, self.ended
        return found

    def void(self) -> dict[str, object]:
        """The names of all that is on record of it, without values."""
        return dict.fromkeys([f"{self.number}", *self._names_decided])

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


@dataclass(frozen=True, slots=True)
class OrderState:
    """What the next daemon of a mount knows of an order, in values of JSON: under "3" where its readers are, and of a list
    under "3/180" the steps from place 180 on.
    """

    name: str = ""  # of a shuffled order, with the place at which they began
    front: int = 0
    start: int = 0
    steps: list[int] = field(default_factory=list)


def _restored(number: int, state: OrderState, parts: Iterable[tuple[int, list[int]]], now: float) -> HintedStream:
    """`UsageError` if it has no meaning, or not all of it is there."""
    if state.name:
        hint = parse_hint(state.name)
        if not isinstance(hint, ShuffleHint):
            raise UsageError(f"{state.name}: no shuffled order")
        return HintedStream(hint.order, hint.at, now, number)
    order = ListedOrder()
    for at, steps in parts:
        if at != len(order):
            raise UsageError(f"the steps from place {len(order)} to {at} are missing")
        order.extend(map(Step, steps))
    if state.start > len(order) or not len(order):
        raise UsageError("the steps of a list are missing")
    return HintedStream(order, state.start, now, number)


class HintedStreams:
    """The hinted readers of one mount."""

    def __init__(self) -> None:
        self.decide: Callable[[Mapping[str, object]], None] = lambda _: None  # puts on record; an `OrderState` by name
        self._streams: list[HintedStream] = []
        self._decided: list[HintedStream] = []  # those on record
        self._number = 0  # of the next one
        self._usual: frozenset[SliceIndex] = frozenset()  # the slices that hinted readers opened last

    def accept(self, hint: Hint, now: float) -> None:
        """`UsageError` for a part of a list whose earlier part is missing, or for too much."""
        if isinstance(hint, NoHint):
            self._streams.clear()
        elif isinstance(hint, ShuffleHint):
            self._move_to(hint.order, hint.at, now)
        else:
            self._extend(hint, now)
        self._decide()

    def note_open(self, step: Step, index: SliceIndex, now: float) -> bool | None:
        """None unless the step was announced; True if it is the first file of it."""
        matched: bool | None = None
        due = False
        for stream in list(self._streams):
            fresh = stream.note_open(step, index, now)
            if fresh is None:
                continue
            matched = bool(matched) or fresh
            self._usual = stream.slices() or self._usual
            due |= stream.lags or (stream.settled and self._drop_before(stream))
        if due:
            self._decide()
        return matched

    def plan(
        self, *, hinted: frozenset[SliceIndex], window_of: Callable[[int], int], first: Step, frontier: Step, now: float
    ) -> Plan:
        """Announced steps of [first, frontier] that will be opened next, nearest first. `window_of` says how many
        steps ahead for so many slices a step.
        """
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

    def near(self) -> dict[str, list[list[int]]]:
        """What was opened near the fronts, by order: it only warms."""
        return {f"{stream.number}": stream.near() for stream in self._streams}

    def settle(self) -> None:
        """Put the fronts on record as they are."""
        self._decide(exact=True)

    def inherit(self, orders: Mapping[str, OrderState], near: Mapping[str, list[list[int]]], now: float) -> None:
        """Go on from what another daemon has decided, as far as it has a meaning."""
        heads, parts = dict[int, OrderState](), dict[int, list[tuple[int, list[int]]]]()
        for name, state in orders.items():
            if (found := _NAME.fullmatch(name)) is None:
                continue
            number = int(found[1])
            if found[2] is None:
                heads[number] = state
            else:
                parts.setdefault(number, []).append((int(found[2]), state.steps))
        for number in sorted(heads)[-STREAMS_MAX:]:
            with suppress(UsageError):
                stream = _restored(number, heads[number], sorted(parts.get(number, [])), now)
                stream.inherit(heads[number].front, near.get(f"{number}", []))
                self._streams.append(stream)
                self._usual = stream.slices() or self._usual
        self._number = max([*heads, *parts], default=-1) + 1
        self._decide()

    def _decide(self, *, exact: bool = False) -> None:
        """Put on record what has changed, in one write, before anybody acts on it."""
        changes, there = dict[str, object](), set(self._streams)
        for stream in self._decided:
            if stream not in there:
                changes |= stream.void()
        self._decided = [stream for stream in self._streams if not isinstance(stream.order, StridedOrder)]
        for stream in self._decided:
            changes |= stream.undecided(exact=exact)
        if changes:
            self.decide(changes)

    def describe(self) -> list[dict[str, int]]:
        """Each order's length and the place of its readers, for the control file."""
        return [
            {"steps": len(stream.order), "at": stream.front, "lowest": stream.order.lowest} for stream in self._streams
        ]

    def _drop_before(self, stream: HintedStream) -> bool:
        """Forget the epochs of the same readers that were announced before; whether there were any."""
        place = self._streams.index(stream)
        kept = [old for old in self._streams[:place] if not stream.order.follows(old.order)]
        self._streams = kept + self._streams[place:]
        return len(kept) < place

    def _move_to(self, order: Order, at: int, now: float) -> None:
        for stream in self._streams:
            if stream.order == order:
                stream.move(at, now)
                return
        # An epoch begins while the last steps of the one before are still being opened.
        followed = [stream for stream in self._streams if order.follows(stream.order)]
        for stream in followed[:-1] if at == 0 else followed:
            self._streams.remove(stream)
        self._add(order, at, now)

    def _extend(self, hint: StepsHint, now: float) -> None:
        listed = [stream for stream in self._streams if isinstance(stream.order, ListedOrder)]
        if hint.at == 0:
            for stream in listed:
                self._streams.remove(stream)
            self._add(ListedOrder(hint.steps), 0, now)
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

    def _add(self, order: Order, at: int, now: float) -> None:
        self._streams.append(HintedStream(order, at, now, self._number))
        self._number += 1
        if len(self._streams) > STREAMS_MAX:
            self._streams.remove(min(self._streams, key=lambda stream: stream.touched_at))
