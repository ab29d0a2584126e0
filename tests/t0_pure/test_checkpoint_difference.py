"""What nodes record of a directory, each from looks of any age: never too little, and in the end what is there."""

from __future__ import annotations

import random

import pytest

from stepfs.checkpoints.difference import Difference
from stepfs.format.ids import Step

Steps = frozenset[Step]
RUNS = 3000


def directory(rng: random.Random) -> list[Steps]:
    """A trainer's directory after each write and each deletion: it keeps the last few, and sometimes goes back."""
    history, step, keep = [frozenset({Step(1)})], 1, rng.randint(1, 3)
    for _ in range(rng.randint(2, 6)):
        step += 1
        history.append(history[-1] | {Step(step)})
        for old in sorted(history[-1])[:-keep]:
            history.append(history[-1] - {old})
        if rng.random() < 0.5:
            step = rng.choice(sorted(history[-1]))
            for newer in sorted((kept for kept in history[-1] if kept > step), reverse=True):
                history.append(history[-1] - {newer})
    return history


class Node:
    """Its looks are in the order of the directory's history, and as old as it likes when they are recorded."""

    def __init__(self, starts_at: int) -> None:
        self.seen: Steps | None = None
        self.at = starts_at

    def records(self, look: Steps, kept: Steps) -> Steps:
        difference = Difference(self.seen, look, look)
        if difference.is_empty:
            return kept
        self.seen = difference.seen_next(kept)
        return difference.apply(kept)


def run(seed: int) -> None:
    rng = random.Random(seed)
    history = directory(rng)
    nodes = [Node(0) for _ in range(rng.randint(2, 4))]
    kept: Steps = frozenset()
    need = 0
    for present in range(len(history)):
        for node in rng.sample(nodes, rng.randint(0, len(nodes))):
            if rng.random() < 0.05:
                node.seen = None  # it starts again
            node.at = rng.randint(node.at, present)
            kept = node.records(history[node.at], kept)
            need = min(kept, default=need)
            assert need <= min(history[present]), f"seed {seed}: {set(kept)}, {set(history[present])} are there"
    for _ in range(2):
        for node in rng.sample(nodes, len(nodes)):
            kept = node.records(history[-1], kept)
    assert kept == history[-1], f"seed {seed}: {set(kept)} in the end, {set(history[-1])} are there"
    for node in nodes:
        assert node.records(history[-1], kept) == kept, "and it stays"


def test_what_nodes_record_from_looks_of_any_age_never_passes_what_is_there() -> None:
    for seed in range(RUNS):
        run(seed)


def only_what_is_new(difference: Difference, kept: Steps) -> Steps:
    """The rule before: a node adds what is new to it."""
    if difference.seen is None:
        return difference.adds or kept
    return (kept | (difference.adds - difference.seen)) - (difference.seen - difference.there)


def never_drops(difference: Difference, kept: Steps) -> Steps:
    return kept | difference.adds


@pytest.mark.parametrize("mutant", [only_what_is_new, never_drops])
def test_the_walk_finds_other_rules(mutant, monkeypatch):
    monkeypatch.setattr(Difference, "apply", mutant)
    with pytest.raises(AssertionError, match="are there"):
        for seed in range(RUNS):
            run(seed)
