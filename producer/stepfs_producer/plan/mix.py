"""Which samples the next step takes: shares of sources by step, and the draw that keeps to them.

Weights are shares of tokens out of `ONE`. The rest of rounding goes to the largest remainders, ties to the
smaller name, so the shares of a step always sum to `ONE` exactly.

A source's debt is the number of tokens that its share of all tokens so far lacks, times 2**32. A step charges the tokens
that it *keeps*: shares are off by 0.005 to 0.015 % then, and by 0.2 to 0.8 % if drawn tokens are charged. Debts sum to zero
exactly. A source that has no share, or no sample left, hands its debt to the others by their shares.

A greatest debt is not a deadline (debts grow at different rates), so no heap helps: few sources are compared in a
loop, many by numpy. Both give the same draws.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Final

import numpy as np

from stepfs_producer.plan.samples import Samples

ONE: Final = 1 << 32

_LOOP_SOURCES_MAX: Final = 12


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples in the order drawn: `source[i]` gives its `number[i]`-th, of `tokens[i]` tokens."""

    source: list[int]
    number: list[int]
    tokens: list[int]
    dry: int | None = None  # the source whose samples are not known far enough; the draw is not finished
    ended: int | None = None  # the source that had its turn and is exhausted, if that ends the plan


def with_live_debts(shares: Sequence[int], debts: Sequence[int], live: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Shares of the live sources, summing to `ONE`, and debts where the others have none. At least one has a share."""
    weights = [share if alive else 0 for share, alive in zip(shares, live, strict=True)]
    owed = sum(debt for debt, weight in zip(debts, weights, strict=True) if not weight)
    extra = apportion(owed, weights)
    moved = [debt + more if weight else 0 for debt, weight, more in zip(debts, weights, extra, strict=True)]
    return apportion(ONE, weights), moved


def account(shares: Sequence[int], debts: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The debts after a step that kept so many tokens of each source."""
    total = sum(kept)
    return [debt + share * total - tokens * ONE for debt, share, tokens in zip(debts, shares, kept, strict=True)]


def draw(
    shares: Sequence[int],
    debts: Sequence[int],
    samples: Sequence[Samples],
    *,
    tokens_max: int,
    until_first: bool,
    whole: bool,
) -> Drawn:
    """Draw while the total is at most `tokens_max`; unless `whole`, the sample that exceeds it is drawn as well.

    `until_first`: an exhausted source that has its turn ends the plan; else the others take its turns.
    `RefusedError` where a source would cross more bad records than it may have.
    """
    turns = _turns(shares, debts)
    given: tuple[list[int], list[int], list[int]] = ([], [], [])
    sources, numbers, counts = given
    lengths = [one.tokens.tolist() for one in samples]
    limits = [len(one.tokens) if one.refused_from is None else one.refused_from for one in samples]
    taken = [0] * len(samples)
    left = tokens_max
    while left > 0:
        source = turns.next  # -1: no source has a share any more
        if source < 0:
            break
        number = taken[source]
        if number >= limits[source]:
            samples[source].refuse_if_spent(number)
            if not samples[source].ended:
                return Drawn(*given, dry=source)
            if until_first:
                return Drawn(*given, ended=source)
            turns = turns.without(source)
            continue
        tokens = lengths[source][number]
        if whole and tokens > left:
            break
        taken[source] = number + 1
        left -= tokens
        sources.append(source)
        numbers.append(number)
        counts.append(tokens)
        turns.gave(source, tokens)
    return Drawn(*given)


class _Loop:
    """Turns among few sources."""

    def __init__(self, shares: Sequence[int], debts: Sequence[int]) -> None:
        self._shares = list(shares)
        self._debts = list(debts)
        self._live = [(index, share) for index, share in enumerate(shares) if share]
        live = [index for index, _ in self._live]
        self.next = max(live, key=self._debts.__getitem__) if live else -1  # the first of equals

    def gave(self, source: int, tokens: int) -> None:
        """Account for a draw: debts and the next turn in one pass, which takes most of the time of a draw."""
        debts = self._debts
        debts[source] -= tokens * ONE
        best, most = -1, 0
        for index, share in self._live:
            debt = debts[index] = debts[index] + share * tokens
            if best < 0 or debt > most:
                best, most = index, debt
        self.next = best

    def without(self, source: int) -> Turns:
        return _without(source, self._shares, self._debts)


class _Vector:
    """Turns among many sources."""

    def __init__(self, shares: Sequence[int], debts: Sequence[int]) -> None:
        self._all_shares = list(shares)
        self._sources = [index for index, share in enumerate(shares) if share]
        self._place = {source: place for place, source in enumerate(self._sources)}
        self._shares = np.array([shares[index] for index in self._sources], np.int64)
        self._debts = np.array([debts[index] for index in self._sources], np.int64)
        self._gain = np.empty_like(self._debts)
        self.next = self._sources[int(self._debts.argmax())]  # the first of equals

    def gave(self, source: int, tokens: int) -> None:
        np.multiply(self._shares, tokens, out=self._gain)
        np.add(self._debts, self._gain, out=self._debts)
        self._debts[self._place[source]] -= tokens * ONE
        self.next = self._sources[int(self._debts.argmax())]

    def without(self, source: int) -> Turns:
        debts = [0] * len(self._all_shares)
        for index, debt in zip(self._sources, self._debts.tolist(), strict=True):
            debts[index] = debt
        return _without(source, self._all_shares, debts)


Turns = _Loop | _Vector


def _without(source: int, shares: Sequence[int], debts: Sequence[int]) -> Turns:
    live = [bool(share) and index != source for index, share in enumerate(shares)]
    return _turns(*with_live_debts(shares, debts, live)) if any(live) else _Loop([], [])


def _turns(shares: Sequence[int], debts: Sequence[int]) -> Turns:
    few = sum(map(bool, shares)) <= _LOOP_SOURCES_MAX
    return _Loop(shares, debts) if few else _Vector(shares, debts)
