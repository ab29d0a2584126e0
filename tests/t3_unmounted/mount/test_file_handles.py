"""A file handle that comes back, as from a client of an NFS export: it resolves while its step can be read, and no longer.

The kernel turns our ENOENT for `.` into ESTALE, which is what such a client is to see of a step that has left.
"""

from __future__ import annotations

import errno

import pytest
from fakemount import Caller, fails, mounted
from faketable import payload

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.view.names import directory_inode, slice_inode


async def test_a_step_that_the_group_no_longer_needs_is_stale():
    async with mounted() as m:
        m.commit(3)
        m.tree.need = Step(2)  # its entry is still at hand
        for inode in (slice_inode(1, 0), directory_inode(1)):
            with fails(errno.ENOENT):
                await m.ops.lookup(inode, b".", Caller())
        with fails(errno.ENOENT):
            await m.ops.lookup(slice_inode(1, 0), b"..", Caller())
        assert list(m.known.between(0, 10)) == []
        assert (await m.ops.lookup(slice_inode(2, 0), b".", Caller())).st_ino == slice_inode(2, 0)


async def test_a_reclaimed_step_is_stale():
    async with mounted() as m:
        m.commit(3)
        m.table.first_live_step = 2
        with fails(errno.ENOENT):
            await m.ops.lookup(slice_inode(1, 0), b".", Caller())


async def test_a_file_that_is_open_resolves_until_it_is_closed():
    async with mounted() as m:
        m.commit(3)
        opened = await m.ops.open(slice_inode(0, 1), 0, Caller())
        m.tree.need = Step(2)
        assert (await m.ops.lookup(slice_inode(0, 1), b".", Caller())).st_size == len(payload(0, 1))
        assert bytes(await m.ops.read(opened.fh, 0, 1 << 20)) == payload(0, 1)
        await m.ops.release(opened.fh)
        with fails(errno.ENOENT):
            await m.ops.lookup(slice_inode(0, 1), b".", Caller())


async def test_a_live_step_whose_index_is_not_loaded_is_loaded():
    async with mounted() as m:
        m.commit(2 * SEGMENT_STEPS)
        m.table.unload(1)
        inode = slice_inode(3, 1)
        assert (await m.ops.lookup(inode, b".", Caller())).st_ino == inode
        assert m.table.loads == [3]


@pytest.mark.parametrize("inode", [0, 15, 1 << 63, 2**64 - 1, slice_inode(0, 7), slice_inode(9, 0)])
@pytest.mark.parametrize("name", [b".", b".."])
async def test_a_handle_that_nobody_gave_out_is_stale(inode, name):
    async with mounted() as m:
        m.commit()
        if name == b".." and inode == slice_inode(0, 7):  # above it is a step that is there
            assert (await m.ops.lookup(inode, name, Caller())).st_ino == directory_inode(0)
            return
        with fails(errno.ENOENT):
            await m.ops.lookup(inode, name, Caller())


async def test_under_steps_a_pending_file_resolves_at_once():
    async with mounted(steps=range(4)) as m:
        m.commit()
        assert (await m.ops.lookup(slice_inode(2, 0), b".", Caller())).st_size == 0
        assert m.waits.waiting == 0
