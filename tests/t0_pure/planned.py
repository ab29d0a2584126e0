"""Sources made of integers for tests of the planner: any piece of them can be delivered, in groups of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np

from stepfs_producer.plan.mix import MixEntry, MixSchedule, Stages, normalise
from stepfs_producer.plan.order import BlockAddress, record_key
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules, SourceRule
from stepfs_producer.plan.samples import BAD, Ahead, BlockHead, Heads, Piece
from stepfs_producer.plan.step import End, Need, State, StepPlan, read_position


class Corpus:
    """A source of `blocks` blocks, two of every fragment; some empty, some records dropped, some bad."""

    def __init__(self, name: str, *, longest: int, blocks: int | None = None, bad: bool = False) -> None:
        self.name, self.longest, self.blocks, self.bad = name, longest, blocks, bad

    def tokens(self, block: int) -> list[int]:
        key = record_key(7, 0, self.name, block, 0)
        return [self._length(block, record) for record in range(key[0] % 24 if key[1] % 7 else 0)]

    def _length(self, block: int, record: int) -> int:
        key = record_key(7, 0, self.name, block, record + 1)
        if self.bad and key[0] < 12:
            return BAD
        if key[1] < 8:
            return 0
        return 1 + int.from_bytes(key[2:6], "little") % max(self.longest >> key[6] % 6, 1)

    def ahead(self, state: State, records: int, group: int) -> Ahead:
        """Metadata of at least `records` records behind the cursor, in pieces of `group` records."""
        source = state.sources[self.name]
        block, first = self.number(source.epoch, source.fragment, source.block), source.taken
        pieces: list[Piece] = []
        while records > 0 and (self.blocks is None or block < self.blocks):
            tokens = self.tokens(block)
            for begin in range(first, max(len(tokens), 1), group):
                taken = np.array(tokens[begin : begin + group], np.int64)
                head = BlockHead(self.place(block), len(tokens), self.place(block + 1))
                pieces.append(Piece(head, begin, Heads(taken)))
                records -= len(taken)
            block, first = block + 1, 0
        return Ahead(tuple(pieces), ended=block == self.blocks)

    @staticmethod
    def place(block: int) -> BlockAddress:
        return BlockAddress(block // 64, block // 2 % 32, block % 2)

    @staticmethod
    def number(epoch: int, fragment: int, block: int) -> int:
        return epoch * 64 + fragment * 2 + block


def rules(
    names: Mapping[str, int], *, lengths: Mapping[int, int], ramp_to: Mapping[str, int] | None = None, **more
) -> Rules:
    """Rules whose sources are `names` with constant weights, or a ramp over ten steps."""
    ordered = sorted(names)
    entries = [MixEntry(0, normalise({name: Fraction(weight) for name, weight in names.items()}, ordered))]
    if ramp_to is not None:
        goal = normalise({name: Fraction(weight) for name, weight in ramp_to.items()}, ordered)
        entries.append(MixEntry(10, goal, ramp=True))
    sources = more.pop("sources", {name: SourceRule(f"{name}-1") for name in ordered})
    return Rules("digest", sources, MixSchedule(entries), Stages(lengths), **more)


def next_step(
    planner: Planner,
    state: State,
    corpora: Mapping[str, Corpus],
    *,
    group: int = 16,
    generous: Callable[[str], int] = lambda name: 1,
) -> StepPlan | End:
    """Deliver what the planner needs, `generous` times as much, until it decides."""
    known = dict.fromkeys(corpora, 0)
    for _ in range(200):
        ahead = {name: corpus.ahead(state, known[name], group) for name, corpus in corpora.items()}
        planned = planner.next(state, ahead)
        if not isinstance(planned, Need):
            return planned
        assert planned.samples
        for name, samples in planned.samples.items():
            known[name] = max(known[name] + group, samples) * generous(name)
    raise AssertionError("the planner never has enough")


def steps(rules: Rules, corpora: Mapping[str, Corpus], count: int, **how) -> list[StepPlan]:
    """The first steps of a plan, each continued from the stored position of the one before."""
    planner = Planner(rules)
    state = planner.begin()
    plans = []
    while len(plans) < count:
        plan = next_step(planner, state, corpora, **how)
        if isinstance(plan, End):
            break
        plans.append(plan)
        state = planner.begin(read_position(plan.after.position()))
    return plans


def small_plan() -> tuple[Rules, dict[str, Corpus]]:
    """A plan with a stage, a ramp, long documents, and a source that ends in the fifth step."""
    chosen = rules(
        {"code": 20, "prose": 70, "chats": 10}, lengths={0: 64, 5: 128},
        ramp_to={"code": 60, "prose": 30, "chats": 10}, ranks=4, micro_batches=2, micro_batch_tokens=256,
    )  # fmt: skip
    corpora = {
        "code": Corpus("code", longest=200),
        "prose": Corpus("prose", longest=90),
        "chats": Corpus("chats", longest=60, blocks=14),
    }
    return chosen, corpora
