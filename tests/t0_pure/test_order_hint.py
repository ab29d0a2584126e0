"""Orders that are announced, and what loaders make of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepfs.checkpoints.watch import Progress
from stepfs.data.announced_orders import (
    EXPIRES_S,
    LISTED_STEPS_MAX,
    STREAMS_MAX,
    HintedStreams,
    NoHint,
    Permutation,
    ShuffledOrder,
    ShuffleHint,
    StepsHint,
    StridedOrder,
    parse_hint,
    shuffle_name,
    steps_names,
)
from stepfs.errors import UsageError
from stepfs.format.ids import SliceIndex, Step
from stepfs.shuffled_steps import ShuffledSteps
from stepfs.torch import coordinates

ALL = Step(10**9)
VERSION_1 = [5, 8, 4, 6, 3, 1, 2, 7, 0, 9]
VERSION_1_LONG = [150852, 219343, 448761]


@given(st.integers(1, 3000), st.integers(0, 10**9), st.integers(0, 100))
def test_a_permutation_has_every_value_once_and_knows_its_place(count, seed, epoch):
    order = Permutation(count, seed=seed, epoch=epoch)
    values = [order.value_at(place) for place in range(count)]
    assert sorted(values) == list(range(count))
    assert all(order.place_of(value) == place for place, value in enumerate(values))


def test_the_order_of_version_1_never_changes():
    """Trainer and daemon may be of different releases: another order must be another version of the hint."""
    order = Permutation(10, seed=7, epoch=3)
    assert [order.value_at(place) for place in range(10)] == VERSION_1
    assert [Permutation(1_000_000, seed=0, epoch=0).value_at(place) for place in range(3)] == VERSION_1_LONG


def test_neighbours_and_epochs_are_unlike():
    order, later = (Permutation(1000, seed=1, epoch=epoch) for epoch in (0, 1))
    values = [order.value_at(place) for place in range(1000)]
    assert sum(abs(a - b) <= 2 for a, b in itertools.pairwise(values)) < 20
    assert sum(value == later.value_at(place) for place, value in enumerate(values)) < 10


@given(st.integers(0, 500), st.integers(1, 400), st.integers(1, 9), st.integers(0, 99))
def test_shards_share_the_steps_among_them(first, count, shards, seed):
    shards = min(shards, count)
    orders = [ShuffledOrder(seed, 0, Step(first), Step(first + count), n, shards) for n in range(shards)]
    steps = [order.step_at(place) for order in orders for place in range(len(order))]
    assert sorted(steps) == list(range(first, first + count))
    for order in orders:
        assert all(order.place_of(order.step_at(place)) == place for place in range(len(order)))
        assert parse_hint(shuffle_name(order, 0)) == ShuffleHint(order, 0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=400), st.integers(1, 8), st.randoms())
def test_every_open_of_a_listed_order_with_repeated_steps_is_recognised(steps, readers, draw):
    """Also by readers that run a little ahead of each other, each of which opens a file of its own."""
    streams = HintedStreams()
    streams.accept(StepsHint(0, tuple(map(Step, steps))), 0.0)
    at = [0] * readers
    for _ in range(len(steps) * readers):
        reader = draw.choice([reader for reader in range(readers) if at[reader] < min(len(steps), min(at) + 20)])
        assert streams.note_open(Step(steps[at[reader]]), SliceIndex(reader), 0.0) is not None
        at[reader] += 1
    assert streams.describe()[0]["at"] == len(steps)


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=600))
def test_a_list_of_steps_survives_its_names(steps):
    found = []
    for name in steps_names(map(Step, steps)):
        assert len(name) <= 255
        hint = parse_hint(name)
        assert isinstance(hint, StepsHint)
        assert hint.at == len(found)
        found += hint.steps
    assert found == steps


@given(st.text(max_size=300) | st.from_regex(r"1-(shuffle|steps)-[-0-9A-Za-z_]{0,60}", fullmatch=True))
def test_any_name_is_a_hint_or_refused(name):
    try:
        parse_hint(name)
    except UsageError:
        return


@pytest.mark.parametrize(
    "name", [
        "1-shuffle-1-0-0-10-0-1", "1-shuffle-1-0-10-10-0-1-0", "1-shuffle-1-0-0-10-1-1-0",
        "1-shuffle-1-0-0-10-0-1-11", "1-shuffle-01-0-0-10-0-1-0", "2-shuffle-1-0-0-10-0-1-0",
        "1-shuffle-1-0-0-9999999999999999-0-1-0", "1-steps-0-", "1-steps-0-gA", "1-steps-0-AQ",
        "1-none-1",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(name):
    with pytest.raises(UsageError):
        parse_hint(name)


def shuffled(count=1000, *, epoch=0, at=0):
    return ShuffleHint(ShuffledOrder(5, epoch, Step(0), Step(count)), at)


def planned(streams, *, window=4, now=0.0, first=0, frontier=ALL, told=()):
    plan = streams.plan(
        hinted=frozenset(told), window_of=lambda _: window, first=Step(first), frontier=Step(frontier), now=now,
    )  # fmt: skip
    return [step for step, _ in plan]


def opened(streams, hint, places, *, now=0.0):
    for place in places:
        streams.note_open(hint.order.step_at(place), SliceIndex(0), now)


def test_what_comes_next_is_what_was_announced():
    streams, hint = HintedStreams(), shuffled()
    streams.accept(hint, 0.0)
    assert planned(streams) == [], "nobody knows which slices"
    assert planned(streams, told=[0]) == [hint.order.step_at(place) for place in range(4)]
    opened(streams, hint, [0, 1, 3])
    assert planned(streams) == [hint.order.step_at(place) for place in (2, 4, 5, 6, 7)]


def test_no_step_that_is_not_committed_or_is_gone():
    streams, hint = HintedStreams(), shuffled()
    streams.accept(hint, 0.0)
    opened(streams, hint, range(5))
    inside = planned(streams, window=100, first=200, frontier=499)
    assert inside
    assert all(200 <= step < 500 for step in inside)


def test_a_step_far_from_the_front_is_somebody_elses():
    streams, hint = HintedStreams(), shuffled()
    streams.accept(hint, 0.0)
    opened(streams, hint, range(3))
    assert streams.note_open(hint.order.step_at(700), SliceIndex(0), 0.0) is None
    assert planned(streams)[0] == hint.order.step_at(3)


def test_hints_expire_and_come_back():
    streams, hint = HintedStreams(), shuffled()
    streams.accept(hint, 0.0)
    opened(streams, hint, range(3))
    assert planned(streams, now=EXPIRES_S - 1)
    assert not planned(streams, now=EXPIRES_S)
    assert streams.needed_from() == 0, "what a checkpoint needs does not expire"
    streams.accept(shuffled(at=2), EXPIRES_S)
    assert planned(streams, now=EXPIRES_S)[0] == hint.order.step_at(3), "the place is kept"


def test_a_trainer_that_resumes_farther_back_reads_those_steps_once_more():
    """The place was kept, and nothing of what it read again was fetched ahead."""
    streams, hint = HintedStreams(), shuffled()
    streams.accept(hint, 0.0)
    opened(streams, hint, range(500))
    streams.accept(shuffled(at=372), 0.0)
    assert planned(streams)[0] == hint.order.step_at(500), "a loader that runs ahead says so once more"
    streams.accept(shuffled(at=200), 0.0)
    assert planned(streams) == [hint.order.step_at(place) for place in range(200, 204)]
    opened(streams, hint, [200])
    assert planned(streams)[0] == hint.order.step_at(201)


@pytest.mark.parametrize("count", [50, 1000])
def test_an_order_that_was_read_to_its_end_is_read_again(count):
    streams, hint = HintedStreams(), shuffled(count)
    for _ in range(2):
        streams.accept(hint, 0.0)
        assert planned(streams, told=[0]) == [hint.order.step_at(place) for place in range(4)]
        opened(streams, hint, range(count))
        assert planned(streams, told=[0]) == []


def test_hints_are_bounded():
    streams = HintedStreams()
    for seed in range(3 * STREAMS_MAX):
        order = ShuffledOrder(seed, 0, Step(seed), Step(seed + 1000))
        streams.accept(ShuffleHint(order, 0), float(seed))
    assert len(streams.describe()) == STREAMS_MAX
    streams.accept(NoHint(), 0.0)
    steps = tuple(Step(step) for step in range(1000))
    with pytest.raises(UsageError):
        for at in range(0, LISTED_STEPS_MAX + 1000, 1000):
            streams.accept(StepsHint(at, steps), 0.0)
    with pytest.raises(UsageError):
        streams.accept(StepsHint(5, steps), 0.0)


def test_a_part_of_a_list_may_be_said_twice_and_not_otherwise():
    streams = HintedStreams()
    parts = [StepsHint(at, tuple(Step(step) for step in range(at, at + 10))) for at in (0, 10, 20)]
    for part in parts:
        streams.accept(part, 0.0)
        if part.at:
            streams.accept(part, 0.0)
    assert streams.describe() == [{"steps": 30, "at": 0, "lowest": 0}]
    for wrong in (StepsHint(31, (Step(1),)), StepsHint(10, (Step(1),))):
        with pytest.raises(UsageError):
            streams.accept(wrong, 0.0)
    assert len(streams.describe()) == 1


def test_a_checkpoint_needs_the_first_step_until_the_epoch_ends():
    streams, hint, following = HintedStreams(), shuffled(300), shuffled(300, epoch=1)
    streams.accept(hint, 0.0)
    assert streams.needed_from() == 0
    opened(streams, hint, range(299))
    assert streams.needed_from() == 0
    opened(streams, hint, [299])
    assert streams.needed_from() is None
    streams.accept(following, 0.0)
    opened(streams, following, range(200))
    assert streams.needed_from() == 0
    opened(streams, following, range(200, 300))
    assert streams.needed_from() is None
    streams.accept(shuffled(300, epoch=2), 0.0)
    streams.accept(NoHint(), 0.0)
    assert streams.needed_from() is None


def test_an_epoch_that_was_left_in_the_middle_ends_with_the_next():
    streams, hint, following = HintedStreams(), shuffled(300), shuffled(300, epoch=1)
    streams.accept(hint, 0.0)
    opened(streams, hint, range(50))
    streams.accept(following, 0.0)
    opened(streams, following, range(300))
    assert streams.needed_from() is None
    assert len(streams.describe()) == 1


def test_the_last_steps_of_an_epoch_are_fetched_while_the_next_begins():
    streams, hint, following = HintedStreams(), shuffled(300), shuffled(300, epoch=1)
    streams.accept(hint, 0.0)
    opened(streams, hint, range(290))
    streams.accept(following, 0.0)
    assert planned(streams) == [
        order.step_at(place) for k in range(4) for order, place in ((hint.order, 290 + k), (following.order, k))
    ]


def test_the_sampler_yields_every_index_in_the_order_that_the_mount_computes():
    sampler = ShuffledSteps(None, first=100, stop=160, seed=3)
    sampler.set_epoch(2)
    order = ShuffledOrder(3, 2, Step(100), Step(160))
    assert [100 + index for index in sampler] == [order.step_at(place) for place in range(60)]
    assert sorted(sampler) == list(range(60))
    assert sampler.next_step == 100
    state = sampler.state_dict()
    again = ShuffledSteps(None, first=100, stop=160, seed=3)
    again.load_state_dict(state, position=50)
    assert len(again) == 10
    assert list(again) == list(sampler)[50:]
    shards = [list(ShuffledSteps(None, first=100, stop=160, seed=3, shard=n, shards=4)) for n in range(4)]
    assert sorted(index for shard in shards for index in shard) == list(range(60))


@pytest.mark.parametrize(
    "options", [{"stop": 0}, {"first": 5, "stop": 5}, {"stop": 5, "shard": 1}, {"stop": 5, "seed": -1}]
)
def test_a_sampler_without_steps_is_refused(options):
    with pytest.raises(UsageError):
        ShuffledSteps(None, **options)


def test_a_watcher_doubts_a_checkpoint_inside_a_shuffled_epoch():
    progress = Progress(Step(1000), Step(900), order_needs_from=Step(100))
    assert "shuffled" in progress.doubt(Step(101))
    assert progress.doubt(Step(100)) == ""
    assert progress.doubt(Step(50)) == ""


@given(first=st.integers(0, 50), count=st.integers(0, 60), block=st.integers(1, 5), workers=st.integers(1, 5))
def test_workers_that_take_turns_read_every_step_once_in_order(first, count, block, workers):
    stop = first + count
    parts = [
        StridedOrder(Step(first + worker * block), Step(stop), block, workers * block) for worker in range(workers)
    ]
    read = [[part.step_at(place) for place in range(len(part))] for part in parts]
    for part, steps in zip(parts, read, strict=True):
        assert [part.place_of(step) for step in steps] == list(range(len(part)))
        others = set(range(first - 3, stop + 3)) - set(steps)
        assert all(part.place_of(Step(step)) is None for step in others)
    turns = [
        step for round_ in range(count + 1) for steps in read for step in steps[round_ * block : (round_ + 1) * block]
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
            order, at = sampler.order.dealt(sampler.position + worker, workers)
            assert [order.step_at(place) for place in range(at, len(order))] == left[worker::workers]


def test_another_pass_follows_the_one_before_and_not_another_readers():
    once = StridedOrder(Step(4), Step(90), 1, 3, turn=1)
    assert StridedOrder(Step(4), Step(90), 1, 3, turn=2).follows(once)
    assert not StridedOrder(Step(4), Step(90), 2, 3, turn=2).follows(once)
    assert once.lowest == 4


@dataclass
class FakeMesh:
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    here: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.here


def test_data_dimensions_count_slowest_first_and_others_are_peers():
    names, shape = ("dp_replicate", "tp", "dp_shard", "cp"), (2, 2, 3, 2)
    for here in itertools.product(*map(range, shape)):
        assert coordinates(FakeMesh(names, shape, here)) == (here[0] * 3 + here[2], 6)


def test_the_mesh_of_a_real_job():
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            assert coordinates(mesh) == coordinates(mesh["dp"]) == (rank // 2 % 2, 2)
            with pytest.raises(UsageError, match="no data dimension"):
                coordinates(mesh["pp", "tp"])
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("names", "here", "said"),
    [
        (None, (0, 0), "mesh_dim_names such as"),
        (("dp", "tp"), None, "no part of the device mesh"),
        (("dp", "fspd"), (0, 0), "fspd looks like a data dimension and is none"),
        (("data", "tp"), (0, 0), "data looks like a data dimension and is none"),
        (("dp_cp", "tp"), (0, 0), "looks like a data dimension"),
        (("pp", "tp"), (0, 0), "no data dimension; add one"),
        (("DP", "tp"), (0, 0), "is no mesh"),
    ],
)
def test_a_mesh_that_leaves_open_who_reads_what_is_refused(names, here, said):
    with pytest.raises(UsageError, match=said):
        coordinates(FakeMesh(names, (2, 2), here))
