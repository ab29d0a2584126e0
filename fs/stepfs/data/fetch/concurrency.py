"""How many GETs are under way at a time: as many as make the store deliver more, learned from their latency.

A store that gives each connection its own share answers N GETs as quickly as one, and more of them deliver more. Once a
link or a disk is full, latency grows in proportion to N, and further GETs only wait in a queue, in front of a reader's
next request. By Little's law N / latency is the throughput, so two limits are compared by latency alone, also while the
readers do not keep all connections busy.

It begins with few, as TCP does: of GETs that share a link none comes before the others, and a reader's first step would
come with all that are fetched ahead. Waits in the first ten steps, 4 MiB each, at 95 % of 50 and 100 MB/s: 0.85 and
0.46 s with 16 GETs at the beginning, 0.40 and 0.23 s with 8, 0.23 and 0.13 s with 4. A store of slow connections is
given twice as many after each eight GETs.

A hill climb in rounds of one limit's worth of GETs. A larger limit is kept if it gives at least half of the expected
gain, a smaller one if it costs almost nothing; between two such steps the limit holds still. More are tried only while
readers wait for bytes: on a full link the additional GETs would delay those that a trainer near its bandwidth needs next,
by as many steps as there are more of them, and it has no lead to spare. The idea is that of
TCP Vegas (Brakmo, Peterson, 1995), of Netflix's `concurrency-limits` (Vegas and Gradient limits for RPC) and of BBR's
probing (Cardwell et al., 2016). Rejected: a gradient against the lowest latency ever seen. The tail of an object
store's latency makes the mean twice its minimum, and the limit would shrink on a store that is not busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

CONNECTIONS_FIRST: Final = 4
CONNECTIONS_MAX: Final = 64
_CONNECTIONS_MIN: Final = 4
_SAMPLES_MIN: Final = 8
_LOADED: Final = 0.7  # share of the limit that must be under way during a GET: else its latency is not used
_UP: Final = 1.5
_DOWN: Final = 0.75
_GAIN_SHARE: Final = 0.5  # of the growth promised
_LOSS_MAX: Final = 0.05
_HOLD_ROUNDS: Final = 8
_AWAITED_SHARE: Final = 0.25  # of the blocks of a round: below it the readers are not waiting

Seconds = Mapping[int, float]  # mean latency by size class


@dataclass(frozen=True, slots=True)
class Started:
    """The limit under which a GET began."""

    number: int
    limit_changes: int


class ConcurrencyLimit:
    """The limit, and the GETs that it is learned from. Plain state, no I/O, no clock."""

    def __init__(
        self,
        limit_max: int = CONNECTIONS_MAX,
        *,
        first: int = CONNECTIONS_FIRST,
        growth: float = 2.0,
        fixed: bool = False,
    ) -> None:
        """At most `limit_max` GETs, `first` until `growth` times as many, or fewer, turn out better. `fixed`: always so many."""
        self.limit_max = limit_max
        self.limit = limit_max if fixed else min(first, limit_max)
        self.fixed = fixed
        self._limit_min = limit_max if fixed else min(_CONNECTIONS_MIN, limit_max)
        self._running = 0
        self._starts = 0
        self._loaded_at = 0  # number of the last GET that found the limit nearly reached
        self._changes = 0
        self._factor = growth  # of the next step
        self._before: tuple[int, Seconds] | None = None  # the limit before the last step, and its latency
        self._hold = 1  # rounds until the next step; in the first all readers wait for their first blocks
        self._round: dict[int, list[float]] = {}
        self._loaded_blocks = 0  # in this round
        self._awaited_blocks = 0  # of these, came while a reader was waiting

    def start(self) -> Started:
        """Note the start of a GET; pass the result to `end`."""
        self._running += 1
        self._starts += 1
        if self._running >= _LOADED * self.limit:
            self._loaded_at = self._starts
        return Started(self._starts, self._changes)

    def end(self, started: Started, size: int, seconds: float | None) -> None:
        """Note the end of a GET of `size` bytes after `seconds`; None: it failed, and its latency is not used."""
        self._running -= 1
        if seconds is None or started.limit_changes != self._changes or self._loaded_at < started.number:
            return
        self._round.setdefault(size.bit_length(), []).append(seconds)
        if sum(map(len, self._round.values())) >= max(_SAMPLES_MIN, self.limit):
            latency = {size: fmean(samples) for size, samples in self._round.items()}
            self._round = {}
            self._end_round(latency)

    def note_loaded(self, *, readers_wait: bool) -> None:
        """A block has come, while some reader waited for bytes or while none did."""
        self._loaded_blocks += 1
        self._awaited_blocks += readers_wait

    def _end_round(self, latency: Seconds) -> None:
        keeps_up = self._awaited_blocks < _AWAITED_SHARE * self._loaded_blocks
        self._loaded_blocks = self._awaited_blocks = 0
        if self._before is not None:
            before, growth = self._before[0], self.limit / self._before[0]
            worth = 1 + _GAIN_SHARE * (growth - 1) if growth > 1 else 1 - _LOSS_MAX
            gain = growth / _slowdown(self._before[1], latency)
            self._before = None
            if gain < worth:
                self._turn(_DOWN if growth > 1 else _UP)
                self._set(before)
                return
        if self._hold:
            self._hold -= 1
            return
        limit = max(self._limit_min, min(self.limit_max, round(self.limit * self._factor)))
        if limit > self.limit and keeps_up:
            return
        if limit == self.limit:
            self._turn(_DOWN if self._factor > 1 else _UP)
        else:
            self._before = self.limit, latency
            self._set(limit)

    def _turn(self, factor: float) -> None:
        """Hold still for a while, then look in the other direction."""
        self._factor, self._hold = factor, _HOLD_ROUNDS

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._changes += 1


def _slowdown(before: Seconds, now: Seconds) -> float:
    """How many times as long a GET takes, over the sizes that are known from both rounds; 1 if there are none."""
    ratios = [now[size] / before[size] for size in before.keys() & now.keys() if before[size] > 0]
    return max(fmean(ratios), 1e-6) if ratios else 1.0
