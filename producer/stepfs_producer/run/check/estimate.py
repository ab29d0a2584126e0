"""Figures of a plan, from its text alone: slices, tokens of a step, shares, and the tokens that each source gives."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stepfs_producer.plan.file.digest import micro_batch_tokens, mix_of
from stepfs_producer.plan.file.schema import Plan
from stepfs_producer.plan.schedule import ONE
from stepfs_producer.run.compile import schedule_of


@dataclass(frozen=True, slots=True)
class MixShares:
    """Shares of tokens at a step, in order of names."""

    step: int
    ramp: bool  # reached linearly from the entry before
    shares: dict[str, Fraction]


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Figures that do not stand in the plan."""

    mix: tuple[MixShares, ...]
    step_tokens: int
    steps: int | None  # at most; None: `until` gives neither steps nor tokens
    tokens: dict[str, int] | None  # that each source gives until then


def estimate_plan(plan: Plan) -> PlanEstimate:
    names = sorted(plan.sources)
    schedule = schedule_of(plan)
    steps_of_mix = [
        (entry.from_ or 0 if entry.ramp_to is None else entry.ramp_to, entry) for entry in mix_of(plan)
    ]
    mix = tuple(
        MixShares(
            step,
            entry.ramp_to is not None,
            {name: Fraction(share, ONE) for name, share in zip(names, schedule.shares(step), strict=True)},
        )
        for step, entry in steps_of_mix
    )
    step_tokens = plan.output.mesh.data_ranks * plan.output.micro_batches * micro_batch_tokens(plan)
    steps = _steps(plan, step_tokens)
    tokens = None if steps is None else _tokens(mix, steps, step_tokens)
    return PlanEstimate(mix, step_tokens, steps, tokens)


def _steps(plan: Plan, step_tokens: int) -> int | None:
    bounds = [] if plan.until.steps is None else [plan.until.steps]
    if plan.until.tokens is not None:
        bounds.append(-(-plan.until.tokens // step_tokens))
    return min(bounds, default=None)


def _tokens(mix: tuple[MixShares, ...], steps: int, step_tokens: int) -> dict[str, int]:
    """Tokens by source over full steps: shares are constant or linear between two entries."""
    total = dict.fromkeys(mix[0].shares, Fraction(0))
    ends = [entry.step for entry in mix[1:]] + [steps]
    for number, (entry, end) in enumerate(zip(mix, ends, strict=True)):
        after = mix[number + 1] if number + 1 < len(mix) else None
        span = min(end, steps) - entry.step
        if span <= 0:
            break
        for name, begin in entry.shares.items():
            slope = Fraction(0)
            if after is not None and after.ramp:
                slope = (after.shares[name] - begin) / (after.step - entry.step)
            total[name] += begin * span + slope * span * (span - 1) / 2
    return {name: int(share * step_tokens) for name, share in total.items()}
