"""The roles of a slice one by one: what may follow each, and the one that takes a slice larger than the budget."""

from __future__ import annotations

from functools import cache

import pytest
from at_work import at_work
from data_doubles import World

from stepfs.data.buffers import Pool
from stepfs.data.cache.memory import Cache
from stepfs.data.counters import DataCounts
from stepfs.data.roles import NEXT, Role
from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex

MIB = 1 << 20


@cache
def world():
    made = World()
    made.add_step([MIB, 20 * MIB])
    return made


async def test_a_slice_that_does_not_fit_is_passed_while_it_is_read_in_order(nursery, autojump_clock):
    slices = await at_work(nursery, Slices(world().store, memory_bytes=18 * MIB))
    handle = slices.reads.open(world().entries[0], SliceIndex(1))
    held = handle._held
    for offset in range(0, handle.length, MIB):
        assert held.role in (Role.OPEN, Role.PASSED)
        await handle.read(offset, MIB)
    assert held.role is Role.PASSED
    handle.close()
    assert held.role is Role.CONSUMED


@pytest.mark.parametrize("role", Role)
def test_only_what_the_table_names_may_follow_a_role(role):
    for other in Role:
        table = Cache(Pool(18 * MIB), DataCounts(), on_disk=lambda _: False)
        held = table.hold(world().entries[0], SliceIndex(0))
        held.handles, held.role = 1, role
        if other is role or other in NEXT[role]:
            table.set_role(held, other)
            assert held.role is other
        else:
            with pytest.raises(AssertionError, match=f"{role.name} → {other.name}"):
                table.set_role(held, other)
