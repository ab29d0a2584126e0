"""A plan with everything filled in that it leaves to defaults: what a run, its digest and its identities read."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction

from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.parts import Mix, Stage
from stepfs_producer.plan.sources import Defaults, Long, OnError, SourceFiles


def resolve(plan: Plan) -> Plan:
    """The same plan: sources and columns in order of names, sources with the settings of `defaults`, rows by `stages`, a mix
    of `weights`, the price of tokens, and the tokens after which it ends. Resolved again it stays as it is.
    """
    output, budget, cost = plan.output, sum(plan.mix[0].tokens.values()) if plan.mix else 0, plan.cost
    if cost.call is None:
        linear, quadratic = cost.coefficients
        cost = cost.changed(hidden_size=None, linear=linear, quadratic=quadratic)
    return plan.changed(
        output=output.changed(
            sequence_length=None,
            micro_batch_tokens=plan.micro_batch_tokens,
            columns=dict(sorted(output.columns.items())),
        ),
        stages=_stages(plan),
        defaults=Defaults(),
        sources={name: _source(plan.defaults, source) for name, source in sorted(plan.sources.items())},
        mix=tuple(map(_weights, plan.mix or (Mix(weights=dict.fromkeys(plan.sources, Fraction(1))),))),
        cost=cost,
        until=plan.until.changed(tokens=plan.until.tokens or budget or None),
    )


def _source(defaults: Defaults, source: SourceFiles) -> SourceFiles:
    """A source without what another setting says, or makes meaningless."""
    common = {one.name: getattr(defaults, one.name) for one in fields(Defaults) if one.name not in source.given}
    if source.is_of_chats and "long" not in source.given and not ("long" in defaults.given and source.is_cut_by_turns):
        common["long"] = Long.DROP  # a turn is never cut
    found = source.changed(**common, sequence_length=None)
    return found if found.on_error.do == "skip" else found.changed(on_error=OnError())


def _stages(plan: Plan) -> tuple[Stage, ...]:
    """`lengths` hold those of sources, where they are less."""
    row = plan.output.sequence_length
    own = {name: one.sequence_length for name, one in plan.sources.items() if one.sequence_length}
    return tuple(
        stage.changed(
            lengths={
                name: length
                for name, length in sorted({**own, **stage.lengths}.items())
                if length != stage.sequence_length
            }
        )
        for stage in (plan.stages if row is None else (Stage(sequence_length=row),))
    )


def _weights(entry: Mix) -> Mix:
    from_ = entry.from_ if entry.ramp_to is not None else entry.from_ or 0
    return entry.changed(from_=from_, weights=entry.drawn, sizes={}, tokens={}, alpha=None, temperature=None)
