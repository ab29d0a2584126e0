"""Ranks to slices: --world, --mesh, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import UsageError
from stepfs.view.ranks import rank_map


@given(st.integers(1, 64), st.integers(1, 16))
def test_every_slice_is_read_by_world_over_slices_consecutive_ranks(slices, links):
    ranks = rank_map(slices, world=slices * links)
    read = [ranks.slice_of(rank) for rank in range(ranks.world)]
    assert read == [rank // links for rank in range(ranks.world)]
    assert ranks.links == links


@pytest.mark.parametrize("world", [0, 1, 3, 7, 9])
def test_a_world_that_does_not_fit_names_both_numbers(world):
    with pytest.raises(UsageError, match=rf"--world {world} .* 4 slices"):
        rank_map(4, world=world)


@given(st.permutations([("pp", 2), ("dp", 4), ("tp", 2), ("cp", 3)]))
def test_a_mesh_agrees_with_unravelling_its_coordinates(dimensions):
    mesh = ",".join(f"{name}={size}" for name, size in dimensions)
    ranks = rank_map(12, mesh=mesh)
    coordinates = itertools.product(*(range(size) for _, size in dimensions))
    for rank, coordinate in enumerate(coordinates):
        index = 0
        for (name, size), value in zip(dimensions, coordinate, strict=True):
            if name in {"dp", "cp"}:
                index = index * size + value
        assert ranks.slice_of(rank) == index
    assert set(Counter(ranks.slice_of(rank) for rank in range(48)).values()) == {ranks.links} == {4}


def test_a_mesh_with_the_data_dimension_first_equals_world():
    mesh, world = rank_map(4, mesh="dp=4,tp=2"), rank_map(4, world=8)
    assert [mesh.slice_of(r) for r in range(8)] == [world.slice_of(r) for r in range(8)]


@pytest.mark.parametrize("mesh", ["", "dp", "dp=0", "dp=4,dp=4", "tp=4", "dp=8", "dp=4;tp=2", "dp=04"])
def test_a_mesh_that_does_not_fit_is_refused(mesh):
    with pytest.raises(UsageError, match="--mesh"):
        rank_map(4, mesh=mesh)


def test_a_world_that_contradicts_the_mesh_is_refused():
    with pytest.raises(UsageError, match="contradicts"):
        rank_map(4, world=4, mesh="dp=4,tp=2")
