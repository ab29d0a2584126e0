"""The names of steps and files, and their inodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.mesh import parse_mesh
from stepfs.view.inodes import (
    SLICES_SERVED_MAX,
    STEP_MAX,
    Fixed,
    SliceFile,
    StepDirectory,
    StepFile,
    WaitFile,
    directory_inode,
    node_of,
    slice_inode,
    step_file_inode,
    wait_file_inode,
)
from stepfs.view.names import RANK_MAX, parse_number, parse_rank, parse_step, rank_name, step_name
from stepfs.view.ranks import FileNames, rank_map

steps = st.integers(0, STEP_MAX).map(Step)
ranks = st.integers(0, RANK_MAX)
slices = st.integers(0, SLICES_SERVED_MAX - 1).map(SliceIndex)
exts = st.sampled_from([b".pt", b".npy", b".tar.gz", b".0"])


@given(steps)
def test_step_names_round_trip(step):
    assert parse_step(step_name(step)) == step
    assert parse_number(b"%d" % step) == step


@given(ranks, exts)
def test_rank_names_round_trip(rank, ext):
    assert parse_rank(rank_name(rank, ext)) == (rank, ext)


@given(st.lists(steps, min_size=2, max_size=2, unique=True))
def test_different_steps_have_different_names_and_padded_ones_sort_by_number(pair):
    low, high = sorted(pair)
    assert step_name(low) != step_name(high)
    if high < 10**9:
        assert step_name(low) < step_name(high)


@given(st.one_of(st.binary(max_size=24), st.from_regex(rb"step-[0-9+ _-]{1,14}", fullmatch=True)))
def test_whatever_parses_is_exactly_the_name_of_what_it_parsed_to(name):
    step = parse_step(name)
    assert step is None or step_name(step) == name


@given(st.from_regex(rb"rank-[0-9+ _-]{1,9}\.pt", fullmatch=True))
def test_whatever_parses_as_a_rank_is_its_name(name):
    parsed = parse_rank(name)
    assert parsed is None or rank_name(*parsed) == name


@pytest.mark.parametrize(
    "name",
    [
        b"step-42",
        b"step-+00000042",
        b"step-0000000042",
        b"step-000000042\n",
        b" step-000000042",
        b"step-00000004_2",
        "step-00000004٢".encode(),  # ARABIC-INDIC DIGIT TWO
        b"STEP-000000042",
        b"step-0x0000042",
        b"step-",
        b"step-9999999999999",  # beyond what an inode number holds
    ],
)
def test_aliases_of_steps_are_refused(name):
    assert parse_step(name) is None


@pytest.mark.parametrize(
    "name", [
        b"rank-3.pt", b"rank-000003.pt", b"rank--0003.pt", b" rank-00003.pt", b"rank-+0003.pt",
        b"Rank-00003.pt",
    ],
)  # fmt: skip
def test_aliases_of_ranks_are_refused(name):
    assert parse_rank(name) is None


@pytest.mark.parametrize("name", [b"", b"042", b"+42", b"-0", b"4 2", b"1e3", b"42\n"])
def test_aliases_of_numbers_are_refused(name):
    assert parse_number(name) is None


def test_names_widen_when_they_outgrow():
    assert step_name(Step(999_999_999)) == b"step-999999999"
    assert step_name(Step(1_000_000_000)) == b"step-1000000000"
    assert parse_step(b"step-1000000000") == 1_000_000_000
    assert rank_name(123456, b".pt") == b"rank-123456.pt"
    assert parse_rank(b"rank-123456.pt") == (123456, b".pt")


nodes = st.one_of(
    st.builds(StepDirectory, steps), st.builds(SliceFile, steps, slices), st.builds(StepFile, steps),
    st.builds(WaitFile, steps), st.sampled_from(Fixed),
)  # fmt: skip


def inode_of(node):
    match node:
        case StepDirectory(step):
            return directory_inode(step)
        case SliceFile(step, index):
            return slice_inode(step, index)
        case StepFile(step):
            return step_file_inode(step)
        case WaitFile(step):
            return wait_file_inode(step)
        case _:
            return int(node)


@given(nodes)
def test_inodes_round_trip_and_fit_the_kernels_signed_offsets(node):
    inode = inode_of(node)
    assert 0 < inode < 2**63
    assert node_of(inode) == node


@given(st.integers(0, 2**64 - 1))
def test_an_inode_that_no_name_has_is_nobody(inode):
    node = node_of(inode)
    assert node is None or inode_of(node) == inode


def test_the_inode_formula_is_a_contract():
    assert directory_inode(Step(41)) == 42 << 20
    assert slice_inode(Step(41), SliceIndex(7)) == 42 << 20 | 8


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
