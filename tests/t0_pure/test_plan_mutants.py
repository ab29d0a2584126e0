"""Planners with one hazard each, which the properties of steps must catch: P1 ties, P2 delivery, P3 debts.

Every mutant is a mistake that is easy to make, and that no single step shows to who looks at it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import small_plan, steps

from stepfs_producer.plan import balance, draw, pack, planner
from stepfs_producer.plan.pack import best_fit
from stepfs_producer.plan.step import StepPlan

STEPS = 8


def complaints(plans: list[StepPlan], honest: list[StepPlan]) -> set[str]:
    """What is wrong with steps that should be the `honest` ones."""
    found = set()
    if [plan.digest() for plan in plans] != [plan.digest() for plan in honest]:
        found.add("other steps")
    if any(sum(source.debt for source in plan.after.sources.values()) for plan in plans):
        found.add("debts do not cancel")
    return found


@pytest.fixture(scope="module")
def honest() -> list[StepPlan]:
    return steps(*small_plan(), STEPS)


def later_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: of equally long documents, the one that was drawn last is packed first."""

    def flipped(lengths: list[int], *, rows: int, sequence_length: int) -> list[int]:
        kept = len(best_fit(lengths, rows=rows, sequence_length=sequence_length))
        return best_fit(lengths[:kept][::-1], rows=rows, sequence_length=sequence_length)[::-1]

    monkeypatch.setattr(pack, "best_fit", flipped)


def later_of_equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: of equally heavy bins, the rows are taken in another order."""
    monkeypatch.setattr(balance, "greedy", lambda costs, bins, greedy=balance.greedy: greedy(costs, bins)[::-1])


def what_is_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: a source with nothing buffered loses its turn, as if it were exhausted."""
    honest_draw = draw.draw

    def hasty(shares, debts, samples, **how):
        return honest_draw(shares, debts, [replace(one, ended=True) for one in samples], **how)

    monkeypatch.setattr(planner, "draw", hasty)


def floor_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the rest of a division is dropped when a source hands its debt on."""

    def floored(total: int, weights: list[int]) -> list[int]:
        return [total * weight // sum(weights) for weight in weights]

    honest = draw.with_live_debts

    def handed_on(*arguments, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draw, "apportion", floored)
            return honest(*arguments, **more)

    monkeypatch.setattr(planner, "with_live_debts", handed_on)


def account_without_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the total that is accounted is the room of a step, not what it kept."""
    honest_account = draw.account

    def roomy(shares, debts, kept):
        debts = [debt + share * (2048 - sum(kept)) for debt, share in zip(debts, shares, strict=True)]
        return honest_account(shares, debts, kept)

    monkeypatch.setattr(planner, "account", roomy)


MUTANTS = {
    later_of_equals: "other steps", later_of_equal_costs: "other steps", what_is_buffered: "other steps",
    floor_shares: "debts do not cancel", account_without_what_was_cut: "debts do not cancel",
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, honest, monkeypatch):
    mutant(monkeypatch)
    assert MUTANTS[mutant] in complaints(steps(*small_plan(), STEPS, group=5), honest)


def test_without_a_mutant_nothing_is_wrong(honest: list[StepPlan]) -> None:
    assert complaints(steps(*small_plan(), STEPS, group=5), honest) == set()
