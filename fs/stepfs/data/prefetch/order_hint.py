"""The hints by which a trainer announces the order of its opens: pure, and the one place that defines their names.

A hint is the name of a file in `.stepfs/order/`; looking that name up gives it (SEMANTICS.md). So it needs no socket, works
wherever the mount is visible, and the kernel gives the user of each lookup. Version 1:

    1-shuffle-<seed>-<epoch>-<first>-<stop>-<shard>-<shards>-<at>    an order that both sides compute (`shuffle`)
    1-steps-<at>-<data>                                              part of a list of step numbers, from place <at> on
    1-none                                                           forget all hints

Numbers are decimal and unpadded. `<data>` is URL-safe base64 without padding of varints: each step number less the one
before (the first less 0), zigzag. At most 255 bytes, which is 80 steps or more.
"""

from __future__ import annotations

import base64
import binascii
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from stepfs.data.prefetch.shuffle import Permutation
from stepfs.errors import UsageError
from stepfs.format.ids import INTEGER_MAX, Step

LISTED_STEPS_MAX: Final = 1 << 17
_NAME_BYTES_MAX: Final = 255
_NUMBER: Final = "(0|[1-9][0-9]{0,15})"
_SHUFFLE: Final = re.compile("1-shuffle" + f"-{_NUMBER}" * 7)
_STEPS: Final = re.compile(f"1-steps-{_NUMBER}-([A-Za-z0-9_-]+)")
_NONE: Final = "1-none"


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
        """As of other orders; steps in order release each other, so no checkpoint asks for it."""
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
        self.extend(steps)

    def extend(self, steps: Iterable[Step]) -> None:
        """`UsageError` beyond `LISTED_STEPS_MAX`."""
        for step in steps:
            if len(self._steps) >= LISTED_STEPS_MAX:
                raise UsageError(f"an order lists at most {LISTED_STEPS_MAX} steps")
            self._places.setdefault(step, array("I")).append(len(self._steps))
            self._steps.append(step)

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
