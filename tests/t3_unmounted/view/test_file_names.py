"""The names of a step's files, for any grid and any mesh that its units can serve."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.format.grid import Grid
from stepfs.format.mesh import parse_mesh
from stepfs.view.ranks import FileNames, rank_map

PEERS = [("tp", 2), ("pp", 3), ("ep", 1)]


@st.composite
def meshes(draw):
    """A grid, and a mesh whose data dimensions divide its units, in any order of dimensions."""
    grid = Grid(
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([("",), ("", "pixels"), ("audio", "pixels")])),
    )
    size = draw(st.sampled_from([each for each in range(1, grid.units + 1) if grid.units % each == 0]))
    inner = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
    context = grid.cp if grid.cp > 1 else draw(st.integers(1, 3))
    peers = draw(st.lists(st.sampled_from(PEERS), unique=True))
    data = [("dp_replicate", size // inner), ("dp_shard", inner)]
    dimensions = draw(st.permutations([*data, ("cp", context), *peers]))
    return grid, parse_mesh(",".join(f"{name}={number}" for name, number in dimensions))


@given(meshes())
def test_every_unit_is_read_by_one_data_rank_in_order_and_peers_see_the_same_inode(drawn):
    grid, mesh = drawn
    names = FileNames(rank_map(grid, mesh=str(mesh)), ".pt")
    read: dict[tuple[int, int], list[int]] = {}
    listed = iter([names[place] for place in range(len(names))])
    each = grid.units // mesh.data_ranks * len(grid.files)
    for data, context in mesh.readers():
        own = list(itertools.islice(listed, each))
        slices = [index for _, index in own]
        reader = (data, context if grid.cp > 1 else 0)
        assert read.setdefault(reader, slices) == slices, "peers"
    assert next(listed, None) is None
    for piece in range(grid.cp):
        found = [index for data in range(mesh.data_ranks) for index in read[data, piece]]
        places = itertools.product(range(grid.units), range(len(grid.files)))
        assert found == [grid.slice_of(unit, piece, file) for unit, file in places]
    assert mesh.world == names.ranks.links * len(read)


@given(meshes())
def test_a_name_leads_to_its_slice_and_a_slice_to_its_first_name(drawn):
    grid, mesh = drawn
    names = FileNames(rank_map(grid, mesh=str(mesh)), ".pt")
    firsts: dict[int, bytes] = {}
    listed = [names[place] for place in range(len(names))]
    for name, index in listed:
        assert names.slice_of(name) == index
        firsts.setdefault(index, name)
    assert len({name for name, _ in listed}) == len(listed)
    assert {index: names.name_of(index) for index in map(grid.slice_of, range(grid.units))}.items() <= firsts.items()
    assert len(firsts) == grid.slices


def test_a_rank_with_one_file_has_a_plain_name_whatever_the_lake_calls_a_micro_batch():
    grid = Grid(4, micro=2)
    assert [FileNames(rank_map(grid, mesh=mesh), ".pt")[2][0] for mesh in ("dp=8", "dp=4", "dp=1")] == [
        b"rank-00002.pt",
        b"rank-00001.micro-0000.pt",
        b"rank-00000.micro-0002.pt",
    ]


def test_the_files_of_a_cut_lake_with_several_files():
    names = FileNames(rank_map(Grid(2, micro=2, cp=2, files=("", "pixels"))), ".pt")
    listed = [names[place][0] for place in range(len(names))]
    assert listed[:5] == [
        b"rank-00000.micro-0000.pt", b"rank-00000.micro-0000.pixels.pt", b"rank-00000.micro-0001.pt",
        b"rank-00000.micro-0001.pixels.pt", b"rank-00001.micro-0000.pt",
    ]  # fmt: skip
    assert listed[-1] == b"rank-00003.micro-0001.pixels.pt"


def test_sorted_names_are_in_the_order_of_accumulation_also_of_more_than_ten_thousand():
    names = FileNames(rank_map(Grid(1, micro=10_001)), ".pt")
    listed = [names[place][0] for place in range(len(names))]
    assert listed == sorted(listed)
    assert listed[-1] == b"rank-00000.micro-10000.pt"


@pytest.mark.parametrize(
    "name",
    [
        b"rank-00003", b"rank-00003.pt.pt", b"rank-00003.PT", b"rank-00004.micro-0000.pt", b"rank-00000.pt",
        b"rank-00000.micro-0.pt", b"rank-00000.micro-00000.pt", b"rank-00000.micro-0002.pt", b"rank-00000.micro-0001",
        b"rank-00000.micro-0000.pixels.pt", b"rank-00000.Micro-0000.pt", b"",
    ],
)  # fmt: skip
def test_a_name_that_no_file_has_leads_nowhere(name):
    assert FileNames(rank_map(Grid(4, micro=2)), ".pt").slice_of(name) is None
