"""Files of steps to come, under `--steps`: named and sized at once, opened when they are there."""

from __future__ import annotations

import errno

import pyfuse3
import pytest
import trio
from fakemount import fails, mounted
from faketable import payload

from stepfs.mount.fuse.operations import PendingSizes


async def test_lookups_attributes_and_listings_of_steps_to_come_never_wait(autojump_clock):
    async with mounted(steps=range(3)) as m:
        found = await m.lookup("step-000000002", "rank-00001.pt")
        assert (found.st_size, found.entry_timeout, found.attr_timeout) == (0, 0, 0)
        again = await m.ops.getattr(found.st_ino, None)
        assert (again.st_size, again.attr_timeout) == (0, 0)
        names = await m.names("step-000000002")
        assert {"rank-00000.pt", "rank-00001.pt"} <= set(names)
        with fails(errno.ENOENT):
            await m.lookup("step-000000002", "rank-00099.pt")
        assert trio.current_time() == 0


async def test_the_kernel_is_told_the_size_of_what_it_believed_to_be_empty(autojump_clock):
    async with mounted(steps=range(3)) as m:
        inode = (await m.lookup("step-000000001", "rank-00000.pt")).st_ino
        m.later(4, m.commit, 2)
        assert await m.read("step-000000001", "rank-00000.pt") == payload(1, 0)
        assert m.sizes_told == [(inode, len(payload(1, 0)) - 1, payload(1, 0)[-1:])]
        assert await m.read("step-000000001", "rank-00000.pt") == payload(1, 0)
        assert len(m.sizes_told) == 1  # once; after that it knows
        found = await m.lookup("step-000000001", "rank-00000.pt")
        assert found.st_size == len(payload(1, 0))
        assert found.attr_timeout > 1000


async def test_what_is_stored_is_the_true_byte():
    """Somebody else may have read that page already: another byte would be served from then on."""
    hinted = []
    sizes = PendingSizes(lambda inode, offset, data: hinted.append((inode, offset, bytes(data))))

    async def last_byte():
        return memoryview(b"x")

    for inode, size in ((1, 1), (2, 4096), (3, 0), (4, 2)):
        sizes.note(inode)
        await sizes.settle(inode, size, last_byte)
    assert hinted == [(1, 0, b"x"), (2, 4095, b"x"), (4, 1, b"x")]


async def test_a_slice_that_cannot_be_read_is_opened_all_the_same():
    sizes = PendingSizes(lambda *_: pytest.fail("nothing is known to be stored"))

    async def last_byte():
        raise pyfuse3.FUSEError(errno.EIO)

    sizes.note(1)
    await sizes.settle(1, 10, last_byte)


async def test_what_the_kernel_forgot_is_not_remembered_here(autojump_clock):
    async with mounted(steps=range(3)) as m:
        inode = (await m.lookup("step-000000001", "rank-00000.pt")).st_ino
        assert len(m.ops.sizes) == 1
        await m.ops.forget([(inode, 1)])
        assert len(m.ops.sizes) == 0


async def test_a_committed_file_is_opened_without_a_word_to_the_kernel(autojump_clock):
    async with mounted(steps=range(3)) as m:
        m.commit(3)
        assert await m.read("step-000000001", "rank-00000.pt") == payload(1, 0)
        assert m.sizes_told == []


@pytest.mark.parametrize("wait_s", [None, 5])
async def test_under_wait_alone_a_name_still_tells_whether_the_step_is_there(autojump_clock, wait_s):
    async with mounted(wait_s=wait_s) as m:
        with fails(errno.ENOENT):
            await m.lookup("step-000000000", "rank-00000.pt")
        assert trio.current_time() == (wait_s or 0)
