"""Ranks to slices: --world, --mesh, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import UsageError
from stepfs.format.grid import Grid
from stepfs.view.ranks import as_keyword, rank_map


@given(st.integers(1, 64), st.integers(1, 16))
def test_every_slice_is_read_by_world_over_slices_consecutive_ranks(slices, links):
    ranks = rank_map(Grid(slices), world=slices * links)
    read = [ranks.slice_of(rank) for rank in range(ranks.world)]
    assert read == [rank // links for rank in range(ranks.world)]
    assert ranks.links == links


@pytest.mark.parametrize("world", [0, 1, 3, 7, 9])
def test_a_world_that_does_not_fit_names_both_numbers(world):
    with pytest.raises(UsageError, match=rf"--world {world} .* 4 slices"):
        rank_map(Grid(4), world=world)


@pytest.mark.parametrize(
    ("grid", "words", "reason"),
    [
        *[(Grid(4), {"mesh": mesh}, "no data dimension; add one, such as dp=4") for mesh in ("tp=4", "pp=2,cp=2")],
        *[
            (Grid(4), {"mesh": mesh}, "--mesh")
            for mesh in ("", "dp", "dp=0", "dp=4,dp=4", "dp=8", "dp=3", "dp=4;tp=2", "dp=04", "dp=4,tp=999999")
        ],
        (Grid(4), {"world": 4, "mesh": "dp=4,tp=2"}, "contradicts"),
        (Grid(2, cp=2), {"mesh": "dp=2"}, r"--mesh dp=2: cp has 1 ranks, .* cut for cp=2"),
        (Grid(2, cp=2), {"mesh": "dp=2,cp=4"}, r"--mesh dp=2,cp=4: cp has 4 ranks, .* cut for cp=2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(grid, words, reason):
    with pytest.raises(UsageError, match=reason):
        rank_map(grid, **words)


@given(st.permutations([("pp", 2), ("dp_replicate", 4), ("tp", 2), ("cp", 3), ("dp_shard", 3)]))
def test_a_mesh_agrees_with_unravelling_its_coordinates(dimensions):
    mesh = ",".join(f"{name}={size}" for name, size in dimensions)
    ranks = rank_map(Grid(12), mesh=mesh)
    coordinates = itertools.product(*(range(size) for _, size in dimensions))
    for rank, coordinate in enumerate(coordinates):
        index = 0
        for (name, size), value in zip(dimensions, coordinate, strict=True):
            if name.startswith("dp_"):
                index = index * size + value
        assert ranks.slice_of(rank) == index
    assert set(Counter(ranks.slice_of(rank) for rank in range(144)).values()) == {ranks.links} == {12}


def test_context_parallel_ranks_of_an_uncut_lake_read_the_whole_rows():
    """Regression: `cp` chose files, so the halves of a sequence were of different documents."""
    ranks = rank_map(Grid(4), mesh="dp=4,cp=2")
    assert [ranks.slice_of(rank) for rank in range(ranks.world)] == [0, 0, 1, 1, 2, 2, 3, 3]
    ranks = rank_map(Grid(4), mesh="dp=2,cp=2")
    assert [ranks.slices_of(rank) for rank in range(ranks.world)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("name", ["dp", "fsdp", "ddp", "hsdp", "dp_replicate", "fsdp_2"])
def test_data_dimensions_choose_files_and_every_other_is_of_peers(name):
    ranks = rank_map(Grid(4), mesh=f"expert=2,{name}=4")
    assert [ranks.slice_of(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "name", ["data", "data_parallel", "dpx", "edp", "dp_cp", "dp_shard_cp", "replicate", "shard", "batch"]
)
@pytest.mark.parametrize("beside", ["", ",dp=4"])
def test_a_name_that_looks_like_data_but_is_none_is_refused_with_what_to_write(name, beside):
    with pytest.raises(UsageError, match=rf"--mesh .*: {name} .*dp, fsdp, ddp, hsdp or dp_…"):
        rank_map(Grid(4), mesh=f"{name}=4{beside}")


def test_a_mesh_with_the_data_dimension_first_equals_world():
    mesh, world = rank_map(Grid(4), mesh="dp=4,tp=2"), rank_map(Grid(4), world=8)
    assert [mesh.slice_of(r) for r in range(8)] == [world.slice_of(r) for r in range(8)]


def test_a_lake_cut_for_context_parallelism_gives_each_piece_to_its_rank():
    ranks = rank_map(Grid(2, cp=2), mesh="cp=2,dp=2,tp=2")
    assert [ranks.slice_of(rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [rank_map(Grid(2, cp=2)).slice_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    ranks = rank_map(Grid(2, micro=2, cp=2), mesh="dp=4,cp=2")
    assert [ranks.slices_of(rank) for rank in range(8)] == [[index] for index in range(8)]


def test_a_data_size_that_does_not_divide_the_micro_batches_is_refused_with_the_nearest_that_do():
    with pytest.raises(
        UsageError,
        match=r"--mesh dp=5: .* 5 ranks, .* the 32 ranks × micro-batches of this lake; dp=4 and dp=8 would",
    ):
        rank_map(Grid(4, micro=8), mesh="dp=5")
    with pytest.raises(UsageError, match=r"dp=2 would \(tp, pp, ep and others are peers"):
        rank_map(Grid(2, cp=2), mesh="dp=4,cp=2")  # here cp chooses files
    with pytest.raises(UsageError, match=r"the 4 ranks of this lake; dp=4 would .*") as refused:
        rank_map(Grid(4), mesh="dp=8")
    message = str(refused.value)
    assert "output.files: micro_batches" in message
    assert ".safetensors and .pt with StepDataset(mesh=…)" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "words", [
        {"mesh": "dp=8"}, {"mesh": "dpx=4"}, {"world": 3}, {"world": 2}, {"world": 4, "mesh": "dp=4,tp=2"},
        {"mesh": "dp=2", "grid": Grid(2, cp=2)},
    ],
)  # fmt: skip
def test_an_error_of_python_writes_keywords_and_one_of_the_command_line_options(words):
    grid, given = words.get("grid", Grid(4)), {name: words[name] for name in words.keys() - {"grid"}}
    with pytest.raises(UsageError) as of_python:
        rank_map(grid, **given, style=as_keyword)
    with pytest.raises(UsageError) as of_options:
        rank_map(grid, **given)
    for name, value in given.items():
        assert f"{name}={value!r}" in str(of_python.value)
        assert f"--{name} {value}" in str(of_options.value)
    assert "--" not in str(of_python.value)


def test_a_world_that_only_a_mesh_can_serve_names_it():
    with pytest.raises(UsageError, match=r"--world 2 .* 4 slices: use a multiple of 4, or --mesh dp=2"):
        rank_map(Grid(4), world=2)
    with pytest.raises(UsageError, match=r"a multiple of 4, or produce a lake of other ranks"):
        rank_map(Grid(4, micro=2), world=3)
    ranks = rank_map(Grid(4, micro=2), world=8)
    assert [ranks.slices_of(rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]], (
        "peers, not eight data ranks"
    )


@given(st.integers(1, 12), st.integers(1, 12))
def test_who_splits_files_gets_all_that_hold_a_part_of_its_units(slices, data):
    ranks = rank_map(Grid(slices), mesh=f"dp={data}", splits=True)
    for micro in (1, 2, 3):  # in each file; what one rank needs of them, from their numbers alone
        if slices * micro % data == 0:
            each = slices * micro // data
            for rank in range(data):
                needed = {unit // micro for unit in range(rank * each, (rank + 1) * each)}
                assert set(ranks.slices_of(rank)) == needed
    assert ranks.micro_batches == len(ranks.units_of(0)) > 0


def test_files_of_one_micro_batch_cannot_be_split():
    with pytest.raises(UsageError, match="do not divide"):
        rank_map(Grid(4, micro=2), mesh="dp=16", splits=True)
