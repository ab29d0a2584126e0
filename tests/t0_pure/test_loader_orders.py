"""What each rank and each worker of its loader reads: the parts are the whole, once, in order; a mesh is data rank
and data ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepfs.data.hints import StridedOrder
from stepfs.errors import UsageError
from stepfs.format.ids import Step
from stepfs.shuffled_steps import ShuffledSteps
from stepfs.torch import coordinates


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
