"""Figures of a plan, from its text alone: slices, tokens of a step, shares, and the tokens that each source gives."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stepfs_producer.plan.file.checks import position_bytes
from stepfs_producer.plan.file.digest import micro_batch_tokens, mix_of, plan_digest, stages_of
from stepfs_producer.plan.file.schema import Plan, Stage
from stepfs_producer.plan.schedule import ONE
from stepfs_producer.run.compile import grid_of, schedule_of


@dataclass(frozen=True, slots=True)
class MixShares:
    """Shares of tokens at a step, in order of names."""

    step: int
    ramp: bool  # reached linearly from the entry before
    shares: dict[str, Fraction]


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Figures of a plan."""

    digest: str
    slices: int
    ranks: int  # of the trainer's mesh
    mesh: str
    data_ranks: int
    files: str  # what has one: `ranks` or `micro_batches`
    micro_batches: int
    micro_batch_tokens: int
    stages: tuple[Stage, ...]
    mix: tuple[MixShares, ...]
    steps: int | None  # at most; None: `until` gives neither steps nor tokens
    position_bytes: int  # at most
    tokens: dict[str, int] | None  # that each source gives until then

    @property
    def step_tokens(self) -> int:
        return self.data_ranks * self.micro_batches * self.micro_batch_tokens


def estimate_plan(plan: Plan) -> PlanEstimate:
    """The figures of a plan."""
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
    whole = micro_batch_tokens(plan)
    step_tokens = plan.output.mesh.data_ranks * plan.output.micro_batches * whole
    steps = _steps(plan, step_tokens)
    return PlanEstimate(
        digest=plan_digest(plan),
        slices=grid_of(plan).slices,
        ranks=plan.output.mesh.world,
        mesh=str(plan.output.mesh),
        data_ranks=plan.output.mesh.data_ranks,
        files=plan.output.files,
        micro_batches=plan.output.micro_batches,
        micro_batch_tokens=whole,
        stages=stages_of(plan),
        mix=mix,
        steps=steps,
        position_bytes=position_bytes(names),
        tokens=None if steps is None else _tokens(mix, steps, step_tokens),
    )


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
