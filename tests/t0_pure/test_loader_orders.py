"""What each worker of a loader reads: the parts are the whole, once, in the order in which the loader gives them out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepfs.data.prefetch.order_hint import StridedOrder
from stepfs.format.ids import Step
from stepfs.shuffled_steps import ShuffledSteps


@given(
    first=st.integers(0, 50),
    count=st.integers(0, 60),
    block=st.integers(1, 5),
    workers=st.integers(1, 5),
)
def test_workers_that_take_turns_read_every_step_once_in_order(first, count, block, workers):
    stop = first + count
    parts = [
        StridedOrder(Step(first + worker * block), Step(stop), block, workers * block)
        for worker in range(workers)
    ]
    read = [[part.step_at(place) for place in range(len(part))] for part in parts]
    for part, steps in zip(parts, read, strict=True):
        assert [part.place_of(step) for step in steps] == list(range(len(part)))
        others = set(range(first - 3, stop + 3)) - set(steps)
        assert all(part.place_of(Step(step)) is None for step in others)
    turns = [
        step
        for round_ in range(count + 1)
        for steps in read
        for step in steps[round_ * block : (round_ + 1) * block]
    ]
    assert turns == list(range(first, stop))


@given(
    count=st.integers(1, 60),
    shards=st.integers(1, 3),
    workers=st.integers(1, 5),
    position=st.integers(0, 20),
    seed=st.integers(0, 9),
)
def test_workers_of_a_shuffled_epoch_know_their_part_of_what_is_left(count, shards, workers, position, seed):
    stop = 7 + max(count, shards)
    for shard in range(shards):
        sampler = ShuffledSteps(None, first=7, stop=stop, seed=seed, shard=shard, shards=shards)
        sampler.set_epoch(3, position=min(position, len(sampler)))
        left = [item + 7 for item in sampler]
        for worker in range(workers):
            order, at = sampler.part(worker, workers)
            assert [order.step_at(place) for place in range(at, len(order))] == left[worker::workers]


def test_another_pass_follows_the_one_before_and_not_another_readers():
    once = StridedOrder(Step(4), Step(90), 1, 3, turn=1)
    assert StridedOrder(Step(4), Step(90), 1, 3, turn=2).follows(once)
    assert not StridedOrder(Step(4), Step(90), 2, 3, turn=2).follows(once)
    assert once.lowest == 4
