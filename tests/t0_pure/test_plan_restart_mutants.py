"""Positions with one hazard each, which these properties must catch: P8 a restart forgives, P9 a position outgrows a commit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import msgpack
import planned
import pytest
from planned import Corpus, rules, steps

from stepfs.errors import RefusedError
from stepfs_producer.plan.rules import SourceRule
from stepfs_producer.plan.samples import SkipBudget
from stepfs_producer.plan.step import SourceState, State, position_bytes_max, read_position

DECADES = {"records": 1 << 62, "skipped": 1 << 62, "tokens": 1 << 62, "debt": -(1 << 62), "run": 1 << 31}


def is_refused(count: int) -> bool:
    """Every one of `count` steps begins from the stored position of the one before, as after a restart."""
    budget = SkipBudget(Fraction(1, 1000), 50)
    chosen = rules(
        {"s": 1}, lengths={0: 64}, ranks=1, micro_batch_tokens=256, sources={"s": SourceRule("s", skips=budget)},
    )  # fmt: skip
    corpus = {"s": Corpus("s", longest=40, bad=True)}
    try:
        steps(chosen, corpus, count)
    except RefusedError:
        return True
    return False


def test_restarts_do_not_forgive_skipped_records() -> None:
    assert not is_refused(5)
    assert is_refused(25)


def test_a_position_that_forgets_them_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8."""

    def forgiving(value: object) -> State:
        state = read_position(value)
        return replace(state, sources={name: replace(one, skipped=0) for name, one in state.sources.items()})

    monkeypatch.setattr(planned, "read_position", forgiving)
    assert not is_refused(25)


def after_decades(state: State) -> int:
    """Bytes of the position when every number has grown."""
    place = {"epoch": 1 << 32, "fragment": 1 << 20, "block": 1 << 32, "taken": 1 << 32, "into": 1 << 32}
    sources = {name: replace(one, **place, **DECADES) for name, one in state.sources.items()}
    return len(msgpack.packb(replace(state, step=1 << 62, sources=sources).position()))


@pytest.mark.parametrize("count", [1, 20, 306])
def test_a_position_is_refused_by_what_it_can_become(count: int) -> None:
    state = State("d" * 32, 0, {f"source-{n}": SourceState("i" * 16, "l" * 32) for n in range(count)})
    assert after_decades(state) <= position_bytes_max(state)
    # P9: by what it is at the start, it would be let in.
    assert len(msgpack.packb(state.position())) < after_decades(state)
