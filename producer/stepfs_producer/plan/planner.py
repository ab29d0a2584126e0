"""The planner: `next(state, ahead)` returns the next step, the samples that it lacks, or the end. It never waits.

A step is decided only when nothing that arrives later could change it, so how samples were grouped, and when they came,
cannot show. More of `ahead` than the step takes changes nothing either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from stepfs.errors import RefusedError
from stepfs_producer.plan.balance import deal
from stepfs_producer.plan.cost import TOKENS, row_costs
from stepfs_producer.plan.mix import ONE, Drawn, account, draw, with_live_debts
from stepfs_producer.plan.pack import Packed, by_document, documents_of, joined, packed, placed, room_of
from stepfs_producer.plan.rules import Exhausted, Packing, Rules
from stepfs_producer.plan.samples import EXCLUDED, Ahead, Samples, samples_after
from stepfs_producer.plan.spans import Span
from stepfs_producer.plan.step import End, Need, SourceState, State, StepPlan

REVISION: Final = 1  # changes with any decision below: steps after a change differ from those before it


class Planner:
    """Decides the steps of one plan."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._names = sorted(rules.sources)

    def begin(self, state: State | None = None) -> State:
        """The state to plan on from: a fresh one, or a stored one with sources that are new to it.

        `RefusedError` for a source whose identity is not the stored one.
        """
        known = {} if state is None else dict(state.sources)
        for name in self._names:
            rule = self._rules.sources[name]
            was = known.get(name)
            if was is not None and was.identity not in (rule.identity, rule.accepted):
                raise RefusedError(
                    f"source {name} is not the one that this lake has taken samples of (its files' rule, shuffle, columns, "
                    "images, tag, chat template, transform or tokenizer changed); undo that, or give it a new name to begin it anew"
                )
            if was is None:
                was = SourceState(rule.identity, rule.listing)
            elif was.identity != rule.identity:  # tokens are other ones, so a record that was begun is taken anew
                was = replace(was, identity=rule.identity, into=0, begun=was.begun if was.taken else 0)
            if rule.cursor is not None:  # accepted so
                epoch, fragment, block, taken, into = rule.cursor
                if was.cursor < rule.cursor:
                    was = replace(was, epoch=epoch, fragment=fragment, block=block, taken=taken, into=into, begun=0)
                was = replace(was, listing=rule.listing)
            known[name] = was
        rules = self._rules
        step, since = (0, None) if state is None else (state.step, state.since)
        if state is not None and state.plan != rules.digest:
            since = step
        return State(rules.digest, step, known, REVISION, rules.tokenizer, rules.held_out, since)

    def next(self, state: State, ahead: Mapping[str, Ahead]) -> StepPlan | Need | End:
        """The step of `state`. `ahead` holds, per source, the known records from its cursor on."""
        rules = self._rules
        if rules.steps_max is not None and state.step >= rules.steps_max:
            return End("the number of steps is reached")
        if rules.tokens_max is not None and state.tokens >= rules.tokens_max:
            return End("the number of tokens is reached")
        length = rules.stages.sequence_length(state.step)
        samples = [
            samples_after(
                name,
                state.sources[name],
                ahead.get(name, Ahead()),
                sequence_length=self._longest(state.step, name),
                long=rules.sources[name].long,
                skips=rules.sources[name].skips,
                pairs=rules.sources[name].pairs,
            )
            for name in self._names
        ]
        shares = rules.mix.shares(state.step)
        live = _live(samples, shares, first=rules.exhausted is Exhausted.FIRST)
        if isinstance(live, Need):
            return live
        if not any(live):
            lost = sum(int(one.lost.sum()) for one in samples)
            why = f"; its last {lost} tokens were of records longer than a row, and dropped" if lost else ""
            return End(
                f"every source is exhausted{why}",
                {one.name: (int(one.dropped.sum()), one.heads.count(EXCLUDED)) for one in samples},
            )
        return self._plan(state, samples, *self._weights(state, shares, live), length)

    def _longest(self, step: int, name: str) -> int:
        """The tokens that a sample of the source may have; both documents of a pair have to fit when they are rounded up."""
        most = self._rules.stages.sample_length(step, name)
        return max(most - self._rules.align + 1, 1) if self._rules.sources[name].pairs else most

    def _weights(self, state: State, shares: Sequence[int], live: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Shares and debts of this step; debts of sources without a share, former ones too, are handed on."""
        debts = [state.sources[name].debt for name in self._names]
        former = sum(source.debt for name, source in state.sources.items() if name not in self._rules.sources)
        weights, moved = with_live_debts([*shares, 0], [*debts, former], [*live, False])
        return weights[:-1], moved[:-1]

    def _plan(
        self, state: State, samples: Sequence[Samples], shares: list[int], debts: list[int], length: int
    ) -> StepPlan | Need | End:
        rules = self._rules
        rows = rules.step_tokens // length
        drawn = draw(
            shares,
            debts,
            samples,
            tokens_max=rows * length,
            until_first=rules.exhausted is Exhausted.FIRST,
            whole=rules.packing is Packing.BEST_FIT,
        )
        if drawn.dry is not None:
            return _need(drawn, samples, shares, rows * length)
        if drawn.ended is not None:
            return End(f"source {samples[drawn.ended].name} is exhausted")
        if not drawn.tokens:
            return End("every source is exhausted")
        kept = packed(drawn, rules, samples, rows=rows, sequence_length=length)
        fill_rows = [rules.stages.sample_length(state.step, name) == length for name in self._names]
        document = documents_of(drawn, kept.sample, samples)
        table, row, document = joined(kept.table, kept.row, document, np.array(fill_rows))
        spans = {one.name.lower(): table[:, one] for one in (Span.TOKENS, Span.SOURCE, Span.RECORD, Span.FIRST)}
        spans |= {name: table[:, len(Span) + index] for index, name in enumerate(rules.columns)}
        columns, span_of = by_document(spans, document)

        def address(number: int) -> str:
            span = int(span_of[number])
            *place, first = table[span, Span.EPOCH : len(Span)].tolist()
            return f"({self._names[table[span, Span.SOURCE]]}, {', '.join(map(str, place))}, {first})"

        costs = row_costs(rules.cost.of_samples(columns, address), row[span_of], rows)
        loads = {
            name: row_costs(
                rules.cost.of_tokens(columns, address) if name == TOKENS else columns[name], row[span_of], rows
            )
            for name in rules.loads
        }
        dealt = deal(
            np.stack(list(loads.values()), axis=1) if loads else costs,
            ranks=rules.ranks,
            micro_batches=rules.micro_batches,
            method=rules.method,
            over=rules.over,
        )
        filled = np.bincount(row, minlength=rows)[dealt].sum(axis=2)  # spans, counted: integers
        if not filled.all() and not rules.pad_last:
            left = f"{kept.kept} samples, {int(kept.table[:, Span.TOKENS].sum())} tokens"
            return End(
                f"what is left ({left}) does not give every micro-batch a token; until: {{last: pad}} takes it, too"
            )
        after, lost = _after(state, self._names, shares, debts, drawn, kept, samples)
        return StepPlan(
            state.step,
            length,
            dealt.shape,
            tuple(self._names),
            tuple(shares),
            placed(table, row, dealt, room_of(table[:, Span.TOKENS], document, rules.align)),
            costs[dealt].sum(axis=2),
            kept.cut,
            lost,
            after,
            {name: load[dealt].sum(axis=2) for name, load in loads.items()},
        )


def _live(samples: Sequence[Samples], shares: Sequence[int], *, first: bool) -> list[bool] | Need:
    """Which sources have a share and a further sample. An exhausted one keeps its share if its turn ends the plan."""
    unknown = {}
    live = []
    for one, share in zip(samples, shares, strict=True):
        if share and not first and not len(one.tokens):
            one.refuse_if_spent(0)
            if not one.ended:
                unknown[one.name] = 1
        live.append(bool(share) and (first or bool(len(one.tokens))))
    return Need(unknown) if unknown else live


def _need(drawn: Drawn, samples: Sequence[Samples], shares: Sequence[int], tokens_max: int) -> Need:
    """How many samples the step is likely to take of each source, by its share and the lengths known; more than known of one."""
    wanted = {}
    for index, (one, share) in enumerate(zip(samples, shares, strict=True)):
        known = len(one.tokens)
        mean = max(int(one.tokens.sum()) // max(known, 1), 1)
        likely = -(-tokens_max * share // ONE) // mean + 1
        if index == drawn.dry:
            wanted[one.name] = max(likely, known + 1)
        elif share and known < likely and known and not one.ended:
            wanted[one.name] = likely
    return Need(wanted)


def _after(
    state: State,
    names: Sequence[str],
    shares: Sequence[int],
    debts: Sequence[int],
    drawn: Drawn,
    spans: Packed,
    samples: Sequence[Samples],
) -> tuple[State, dict[str, int]]:
    """The state behind the kept samples, and the tokens lost on the way, by source."""
    last = spans.kept - 1
    given = spans.tokens_of(last)
    cut = given if given < drawn.tokens[last] else None
    counts = np.bincount(np.array(drawn.source[: spans.kept], np.int64), minlength=len(samples)).tolist()
    sources = dict(state.sources)
    lost = {}
    for name in sources.keys() - set(names):  # former sources: their debts were handed on
        sources[name] = replace(sources[name], debt=0)
    for index, one in enumerate(samples):
        sources[one.name] = one.state_after(counts[index], cut=cut if index == drawn.source[last] else None)
        lost[one.name] = one.lost_by(counts[index], cut=cut if index == drawn.source[last] else None)
    kept = [sources[name].tokens - state.sources[name].tokens for name in names]
    for name, debt in zip(names, account(shares, debts, kept), strict=True):
        sources[name] = replace(sources[name], debt=debt)
    return replace(state, step=state.step + 1, sources=sources), lost
