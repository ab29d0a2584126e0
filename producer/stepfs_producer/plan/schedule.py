"""Weights and sequence lengths by step: parsed from text, normalised once, interpolated in integers.

Weights are shares of tokens out of `ONE`. The rest of rounding goes to the largest remainders, ties to the
smaller name, so the shares of a step always sum to `ONE` exactly.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final

from stepfs.errors import UsageError

ONE: Final = 1 << 32
_DECIMAL: Final = re.compile(r"(\d{1,18}(\.\d{0,18})?|\.\d{1,18})", re.ASCII)


def parse_weight(text: str) -> Fraction:
    """A decimal such as `30` or `0.5`, exactly. `UsageError` for anything else, signs and exponents included."""
    if not _DECIMAL.fullmatch(text):
        raise UsageError(f"weight {text!r}: write a decimal number that is not negative, such as 30 or 0.5")
    return Fraction(text)


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
    """Shares out of `ONE`, in the order of `names` (sorted); 0 for a name without a weight.

    `UsageError` for an unknown name, a negative weight, or weights that are all zero.
    """
    for name, weight in weights.items():
        if name not in names:
            raise UsageError(
                f"the mix weighs {name!r}, which is no source; add it to the sources or remove it"
            )
        if weight < 0:
            raise UsageError(f"the weight of {name!r} is negative; the least is 0")
    if not any(weights.values()):
        raise UsageError("all weights of the mix are zero; give at least one source a positive weight")
    denominator = 1
    for weight in weights.values():
        denominator *= weight.denominator // _common_divisor(denominator, weight.denominator)
    return tuple(apportion(ONE, [int(weights.get(name, Fraction(0)) * denominator) for name in names]))


def _common_divisor(one: int, other: int) -> int:
    while other:
        one, other = other, one % other
    return one


@dataclass(frozen=True, slots=True)
class MixEntry:
    """Shares that hold from `step` on; with `ramp`, approached linearly from the entry before and reached at `step`."""

    step: int
    shares: tuple[int, ...]
    ramp: bool = False


class MixSchedule:
    """Shares of every source at every step."""

    def __init__(self, entries: Sequence[MixEntry]) -> None:
        """`UsageError` unless the entries begin at step 0 without a ramp and their steps increase."""
        if not entries or entries[0].ramp or entries[0].step != 0:
            raise UsageError(
                "the first entry of the mix must hold from step 0: a ramp needs an entry before it"
            )
        for before, after in pairwise(entries):
            if after.step <= before.step:
                raise UsageError(f"the mix entry at step {after.step} must come after step {before.step}")
        assert all(sum(entry.shares) == ONE for entry in entries)
        self._entries = tuple(entries)
        self._steps = [entry.step for entry in entries]

    def shares(self, step: int) -> tuple[int, ...]:
        """Shares out of `ONE` at `step`, in the order of the sources' names."""
        number = bisect_right(self._steps, step)
        here = self._entries[number - 1]
        if number == len(self._entries) or not self._entries[number].ramp:
            return here.shares
        return _between(here, self._entries[number], step)


def _between(before: MixEntry, after: MixEntry, step: int) -> tuple[int, ...]:
    span, gone = after.step - before.step, step - before.step
    scaled = [a * (span - gone) + b * gone for a, b in zip(before.shares, after.shares, strict=True)]
    return tuple(
        apportion(ONE, scaled)
    )  # Σ scaled = ONE * span: floor and remainder are those of scaled / span


class Stages:
    """The sequence length at every step, and those of sources whose samples are shorter than a row."""

    def __init__(
        self, lengths: Mapping[int, int], of_sources: Mapping[int, Mapping[str, int]] | None = None
    ) -> None:
        """First step → sequence length in tokens; first step → source → its own. `UsageError` unless step 0 has one."""
        if 0 not in lengths:
            raise UsageError("no stage begins at step 0; give the first stage `from: 0`")
        self._steps = sorted(lengths)
        self._lengths = dict(lengths)
        self._of_sources = dict(of_sources or {})

    def sequence_length(self, step: int) -> int:
        """Tokens in a row of `step`."""
        return self._lengths[self._first(step)]

    def sample_length(self, step: int, source: str) -> int:
        """The most tokens of `source` that `step` shows as one document; at most a row's."""
        return self._of_sources.get(self._first(step), {}).get(source, self.sequence_length(step))

    def _first(self, step: int) -> int:
        return self._steps[bisect_right(self._steps, step) - 1]

    def every(self) -> list[int]:
        """The sequence length of each stage."""
        return [self._lengths[step] for step in self._steps]
