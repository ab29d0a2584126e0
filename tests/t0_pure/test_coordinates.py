"""A trainer's device mesh as data rank and data ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepfs.errors import UsageError
from stepfs.torch import coordinates


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
