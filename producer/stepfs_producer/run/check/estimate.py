"""Figures of a plan, from its text alone: tokens of a step, shares, and the tokens that each source gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stepfs_producer.plan.draw import ONE, MixEntry
from stepfs_producer.plan.file.digest import micro_batch_tokens
from stepfs_producer.plan.file.schema import Plan
from stepfs_producer.run.compile import schedule_of


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Figures that do not stand in the plan."""

    mix: tuple[MixEntry, ...]
    step_tokens: int
    steps: int | None  # at most; None: `until` gives neither steps nor tokens
    tokens: dict[str, int] | None  # that each source gives until then


def estimate_plan(plan: Plan) -> PlanEstimate:
    mix = schedule_of(plan).entries
    step_tokens = plan.output.mesh.data_ranks * plan.output.micro_batches * micro_batch_tokens(plan)
    steps = _steps(plan, step_tokens)
    tokens = None if steps is None else _tokens(sorted(plan.sources), mix, steps, step_tokens)
    return PlanEstimate(mix, step_tokens, steps, tokens)


def _steps(plan: Plan, step_tokens: int) -> int | None:
    bounds = [] if plan.until.steps is None else [plan.until.steps]
    if plan.until.tokens is not None:
        bounds.append(-(-plan.until.tokens // step_tokens))
    return min(bounds, default=None)


def _tokens(names: Sequence[str], mix: tuple[MixEntry, ...], steps: int, step_tokens: int) -> dict[str, int]:
    """Tokens by source over full steps: shares are constant or linear between two entries."""
    total = dict.fromkeys(names, Fraction(0))
    ends = [entry.step for entry in mix[1:]] + [steps]
    for number, (entry, end) in enumerate(zip(mix, ends, strict=True)):
        after = mix[number + 1] if number + 1 < len(mix) else None
        span = min(end, steps) - entry.step
        if span <= 0:
            break
        for index, (name, begin) in enumerate(zip(names, entry.shares, strict=True)):
            slope = Fraction(0)
            if after is not None and after.ramp:
                slope = Fraction(after.shares[index] - begin, after.step - entry.step)
            total[name] += begin * span + slope * span * (span - 1) / 2
    return {name: int(share * step_tokens / ONE) for name, share in total.items()}
