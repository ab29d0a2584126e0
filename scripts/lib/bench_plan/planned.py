"""Plans over lengths alone: the planner's own calls, without sources, tokens or a lake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from stepfs_producer.plan.arrays import Integers
from stepfs_producer.plan.mix import MixEntry, MixSchedule, Stages, normalise
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules, SourceRule
from stepfs_producer.plan.samples import Ahead, BlockHead, Heads, Piece
from stepfs_producer.plan.step import End, Need, SourceState, State, StepPlan

Weights = Mapping[str, int]


def shares(weights: Weights) -> tuple[int, ...]:
    return normalise({name: Fraction(weight) for name, weight in weights.items()}, sorted(weights))


def rules(
    weights: Weights,
    length: int,
    ranks: int,
    *,
    entries: list[MixEntry] | None = None,
    of_sources: Mapping[str, int] | None = None,
    **more: Any,
) -> Rules:
    mix = MixSchedule(entries or [MixEntry(0, shares(weights))])
    sources = {name: SourceRule(name) for name in weights}
    return Rules("bench", sources, mix, Stages({0: length}, {0: of_sources or {}}), ranks, **more)


def ahead_of(source: SourceState, lengths: Integers, count: int, rows: Integers | None = None) -> Ahead:
    """`count` records behind the cursor; an epoch is one block of all lengths, and of their `rows` [records, columns]."""
    pieces: list[Piece] = []
    epoch, taken = source.epoch, source.taken
    while count > 0:
        tokens = lengths[taken : taken + count]
        theirs = None if rows is None else rows[taken : taken + count]
        block = BlockHead(BlockAddress(epoch, 0, 0), len(lengths), BlockAddress(epoch + 1, 0, 0))
        pieces.append(Piece(block, taken, Heads(tokens, theirs)))
        count -= len(tokens)
        epoch, taken = epoch + 1, 0
    return Ahead(tuple(pieces))


def ahead(
    state: State, lengths: Mapping[str, Integers], known: Mapping[str, int], rows: Mapping[str, Integers]
) -> dict[str, Ahead]:
    return {name: ahead_of(state.sources[name], lengths[name], known[name], rows.get(name)) for name in lengths}


def steps(
    chosen: Rules, lengths: Mapping[str, Integers], count: int, rows: Mapping[str, Integers] = MappingProxyType({})
) -> Iterator[StepPlan]:
    planner = Planner(chosen)
    state = planner.begin()
    known = dict.fromkeys(lengths, 8)
    for _ in range(count):
        while isinstance(planned := planner.next(state, ahead(state, lengths, known, rows)), Need):
            for name, samples in planned.samples.items():
                known[name] = max(known[name], samples + samples // 4)
        assert not isinstance(planned, End)
        yield planned
        state = planned.after


def slowdown(costs: Integers, *, meet: bool) -> float:
    """Slowest ÷ mean rank of [ranks, micro-batches]; with `meet`, ranks wait for one another at every micro-batch."""
    waited = costs.max(axis=0).sum() if meet else costs.sum(axis=1).max()
    return float(waited * len(costs) / costs.sum())
