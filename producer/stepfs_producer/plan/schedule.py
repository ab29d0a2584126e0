"""Weights and sequence lengths by step: normalised once, interpolated in integers.

Weights are shares of tokens out of `ONE`. The rest of rounding goes to the largest remainders, ties to the
smaller name, so the shares of a step always sum to `ONE` exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final

ONE: Final = 1 << 32


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` dealt by weight: floor, then largest remainder, ties to the smaller index. Also for negative totals."""
    whole = sum(weights)
    products = [total * weight for weight in weights]
    shares = [product // whole for product in products]
    left = total - sum(shares)
    for index in sorted(range(len(weights)), key=lambda index: -(products[index] % whole))[:left]:
        shares[index] += 1
    return shares


def normalise(weights: Mapping[str, Fraction], names: Sequence[str]) -> tuple[int, ...]:
    """Shares out of `ONE`, in the order of `names` (sorted); 0 for a name without a weight."""
    assert set(weights) <= set(names)
    assert min(weights.values()) >= 0 < max(weights.values())
    denominator = math.lcm(*(weight.denominator for weight in weights.values()))
    return tuple(apportion(ONE, [int(weights.get(name, Fraction(0)) * denominator) for name in names]))


@dataclass(frozen=True, slots=True)
class MixEntry:
    """Shares that hold from `step` on; with `ramp`, approached linearly from the entry before and reached at `step`."""

    step: int
    shares: tuple[int, ...]
    ramp: bool = False


class MixSchedule:
    """Shares of every source at every step."""

    def __init__(self, entries: Sequence[MixEntry]) -> None:
        """The entries begin at step 0 without a ramp, and their steps increase."""
        assert not entries[0].ramp
        assert entries[0].step == 0
        assert all(before.step < after.step for before, after in pairwise(entries))
        assert all(sum(entry.shares) == ONE for entry in entries)
        self.entries = tuple(entries)
        self._steps = [entry.step for entry in entries]

    def shares(self, step: int) -> tuple[int, ...]:
        """Shares out of `ONE` at `step`, in the order of the sources' names."""
        number = bisect_right(self._steps, step)
        here = self.entries[number - 1]
        if number == len(self.entries) or not self.entries[number].ramp:
            return here.shares
        return _between(here, self.entries[number], step)


def _between(before: MixEntry, after: MixEntry, step: int) -> tuple[int, ...]:
    span, gone = after.step - before.step, step - before.step
    scaled = [a * (span - gone) + b * gone for a, b in zip(before.shares, after.shares, strict=True)]
    # Σ scaled = ONE * span, so floor and remainder are those of scaled / span.
    return tuple(apportion(ONE, scaled))


class Stages:
    """The sequence length at every step, and those of sources whose samples are shorter than a row."""

    def __init__(self, lengths: Mapping[int, int], of_sources: Mapping[int, Mapping[str, int]] | None = None) -> None:
        """First step → sequence length in tokens; first step → source → its own. Step 0 has one."""
        assert 0 in lengths
        self._steps = sorted(lengths)
        self._lengths = dict(lengths)
        self._of_sources = dict(of_sources or {})

    def sequence_length(self, step: int) -> int:
        return self._lengths[self._first(step)]

    def sample_length(self, step: int, source: str) -> int:
        """The most tokens of `source` that `step` shows as one document; at most a row's."""
        return self._of_sources.get(self._first(step), {}).get(source, self.sequence_length(step))

    def _first(self, step: int) -> int:
        return self._steps[bisect_right(self._steps, step) - 1]

    def every(self) -> list[int]:
        return [self._lengths[step] for step in self._steps]
