"""The tree against a reference model that is a plain set of steps, through random histories and every option."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from faketable import CREATED_MS, FakeTable
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepfs.errors import RefusedError
from stepfs.format.ids import SliceIndex, Step
from stepfs.view import attributes
from stepfs.view.inodes import Fixed, directory_inode, slice_inode
from stepfs.view.ranks import check_steps
from stepfs.view.tree import AHEAD_STEPS_MAX, Presence, Tree, ViewOptions

option_sets = st.builds(
    ViewOptions,
    steps=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ab: range(min(ab), max(ab))),
    wait=st.booleans(),
)


@dataclass
class Model:
    """Every committed step ever, what was taken away, and whether more may come."""

    committed: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    sealed: bool = False

    def live(self) -> set[int]:
        return self.committed - self.gone


class TreeAgainstModel(RuleBasedStateMachine):
    @initialize(options=option_sets)
    def mount(self, options):
        self.table = FakeTable()
        self.options = options
        self.tree = Tree(self.table, options)
        self.model = Model()

    @precondition(lambda self: not self.model.sealed)
    @rule(count=st.integers(1, 5))
    def commit(self, count):
        first = len(self.model.committed)
        self.model.committed |= set(range(first, first + count))
        self.table.commit(count)

    @rule(upto=st.integers(0, 25))
    def reclaim(self, upto):
        upto = min(upto, len(self.model.committed))
        self.model.gone |= set(range(upto))
        self.table.first_live_step = Step(max(self.table.first_live_step, upto))

    @rule(need=st.integers(0, 25))
    def checkpoint(self, need):
        if need >= self.tree.need:
            self.tree.need = Step(need)
            self.model.gone |= set(range(need))

    @rule()
    def seal(self):
        self.model.sealed = True
        self.table.seal()

    @invariant()
    def listing_is_the_model(self):
        if not hasattr(self, "model"):
            return
        expected = sorted(self.model.live())
        if self.options.steps is not None:
            expected = list(self.options.steps)
        assert list(self.tree.listed()) == expected

    @invariant()
    def names_resolve_as_the_model_says(self):
        if not hasattr(self, "model"):
            return
        for step in range(32):
            assert self.tree.presence(Step(step)) is self.expected(step), step

    @invariant()
    def what_can_be_opened_lies_between_first_and_last(self):
        if not hasattr(self, "model"):
            return
        readable = [step for step in range(128) if self.tree.readable(Step(step))]
        if readable:
            assert self.tree.first_visible() <= readable[0]
            assert self.tree.last_visible() == readable[-1]

    def expected(self, step):
        steps = self.options.steps
        to_come = step not in self.model.committed and not self.model.sealed
        if steps is not None:
            if step not in steps:
                return Presence.ABSENT
            if step in self.model.live():
                return Presence.COMMITTED
            return Presence.PENDING if to_come else Presence.GONE
        if step in self.model.live():
            return Presence.COMMITTED
        return Presence.PENDING if self.options.wait and to_come else Presence.ABSENT

    @invariant()
    def latest_is_the_newest_live_step(self):
        if not hasattr(self, "model"):
            return
        newest = max(self.model.committed, default=None)
        visible = newest is not None and newest in self.model.live() and self.options.steps is None
        assert self.tree.latest() == (newest if visible else None)


TestTree = TreeAgainstModel.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def test_waiting_names_end_a_thousand_steps_ahead():
    table = FakeTable()
    table.commit(3)
    tree = Tree(table, ViewOptions(wait=True))
    assert tree.presence(Step(2 + AHEAD_STEPS_MAX)) is Presence.PENDING
    assert tree.presence(Step(3 + AHEAD_STEPS_MAX)) is Presence.ABSENT


def test_a_million_steps_are_listed_without_being_built():
    table = FakeTable()
    table.commit(1_000_000)
    assert len(Tree(table, ViewOptions()).listed()) == 1_000_000


def test_attributes_of_committed_files_are_constants_of_the_commit():
    table = FakeTable()
    table.commit(5)
    entry = table.make_entry(3)
    before = attributes.slice_file(entry, SliceIndex(1), 4)
    table.commit(5)
    assert attributes.slice_file(table.make_entry(3), SliceIndex(1), 4) == before
    assert before.inode == slice_inode(Step(3), SliceIndex(1))
    assert before.size == entry.tgb.length(SliceIndex(1))
    assert (before.mode, before.nlink, before.time_ms) == (0o100444, 4, entry.time_ms)


def test_a_pending_directory_is_the_same_inode_and_never_kept():
    table = FakeTable()
    tree = Tree(table, ViewOptions(wait=True))
    pending = attributes.step_directory(table, tree, Step(0))
    table.commit()
    committed = attributes.step_directory(table, tree, Step(0))
    assert pending.inode == committed.inode == directory_inode(Step(0))
    assert (pending.keep_s, pending.time_ms) == (0.0, CREATED_MS)
    assert committed.keep_s > 1e6


def test_the_root_is_as_old_as_the_newest_commit():
    table = FakeTable()
    assert attributes.root(table).time_ms == CREATED_MS
    table.commit()
    assert attributes.root(table).time_ms == table.state.time_ms
    assert attributes.root(table).inode == Fixed.ROOT


@pytest.mark.parametrize("presence", [Presence.PENDING, Presence.GONE])
def test_what_is_not_there_yet_or_any_more_is_still_a_directory_under_steps(presence):
    table = FakeTable()
    tree = Tree(table, ViewOptions(steps=range(4)))
    if presence is Presence.GONE:
        table.commit(4)
        table.first_live_step = Step(4)
    assert tree.presence(Step(1)) is presence
    assert attributes.step_directory(table, tree, Step(1)).mode == 0o040555


def test_under_steps_files_keep_their_names_behind_checkpoints_but_not_beyond_the_end():
    table = FakeTable()
    table.commit(3)
    tree = Tree(table, ViewOptions(steps=range(5)))
    tree.need = Step(2)
    assert [tree.names_known(Step(step)) for step in range(6)] == [True, True, False, True, True, False]
    table.seal()
    assert [tree.names_known(Step(step)) for step in range(6)] == [True, True, *[False] * 4]
    plain = Tree(table, ViewOptions())
    plain.need = Step(2)
    assert not plain.names_known(Step(0))


def test_a_group_that_rolls_back_shows_its_older_steps_again():
    table = FakeTable()
    table.commit(10)
    tree = Tree(table, ViewOptions())
    found = []
    for need in (6, 6, 2, 4):
        tree.need = Step(need)
        found.append(tree.take_new_first_visible())
        assert list(tree.listed()) == list(range(need, 10))
    table.first_live_step = Step(5)
    assert [*found, tree.take_new_first_visible()] == [6, None, None, 4, 5]


@pytest.mark.parametrize(
    ("steps", "committed", "advice"),
    [
        (range(2, 9), 5, "Mount at most --steps 2:5"),
        (range(7, 9), 5, "Name steps that it has"),
        (range(9), 0, "another lake"),
    ],
)
def test_steps_of_a_sealed_lake_that_never_come_are_refused_with_what_can_be_had(steps, committed, advice) -> None:
    table = FakeTable()
    table.commit(committed)
    table.seal()
    with pytest.raises(RefusedError, match=advice):
        check_steps(steps, table.state)
