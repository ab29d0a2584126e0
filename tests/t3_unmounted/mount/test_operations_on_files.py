"""Handlers without a kernel: opening, reading, what is refused, and how failures below reach a reader."""

from __future__ import annotations

import errno
import os

import pytest
import trio
from fakemount import ROOT, Caller, fails, mounted
from faketable import payload

from stepfs.errors import ArchivedError, CorruptError, StoreUnreachableError
from stepfs.mount.fuse.guard import CHANGES
from stepfs.view.names import directory_inode


async def test_the_root_never_waits_even_when_no_segment_is_loaded():
    async with mounted() as m:
        m.commit(3)
        m.table.unloaded = {0, 1, 2}
        m.table.load_gate = trio.Event()
        with trio.fail_after(20):
            await m.names()
            await m.lookup("step-000000001")
            await m.ops.getattr(directory_inode(1), Caller())
            await m.lookup("latest")
        assert m.table.loads == []


async def test_a_file_of_an_unloaded_segment_loads_it_once_for_all_who_wait():
    async with mounted() as m:
        m.commit(3)
        m.table.unloaded = {1}
        m.table.load_gate = trio.Event()
        got = []

        async def reader():
            got.append(await m.read("step-000000001", "rank-00000.pt"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            m.table.load_gate.set()
        assert got == [payload(1, 0)] * 5
        assert m.table.loads == [1]


async def test_opening_pins_and_release_lets_go():
    async with mounted() as m:
        m.commit()
        inode = (await m.lookup("step-000000000", "rank-00000.pt")).st_ino
        first = await m.ops.open(inode, os.O_RDONLY, Caller())
        second = await m.ops.open(inode, os.O_RDONLY, Caller())
        assert first.keep_cache
        assert not first.direct_io
        assert m.slices.open_handles == 2
        m.table.first_live_step = 1  # reclaimed while open
        assert bytes(await m.ops.read(first.fh, 1, 3)) == payload(0, 0)[1:4]
        assert (await m.ops.getattr(inode, Caller())).st_size == len(payload(0, 0))
        await m.ops.release(first.fh)
        await m.ops.release(second.fh)
        assert m.slices.open_handles == 0
        with fails(errno.EBADF):
            await m.ops.read(first.fh, 0, 1)
        with fails(errno.ENOENT):
            await m.ops.getattr(inode, Caller())


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_APPEND])
async def test_opening_for_writing_is_refused(flags):
    async with mounted() as m:
        m.commit()
        inode = (await m.lookup("step-000000000", "rank-00000.pt")).st_ino
        with fails(errno.EROFS):
            await m.ops.open(inode, flags, Caller())


@pytest.mark.parametrize("name", CHANGES)
async def test_every_change_is_erofs(name):
    async with mounted() as m:
        with fails(errno.EROFS):
            await getattr(m.ops, name)(ROOT, b"x", 0, Caller())
        assert m.meter.errors == {(name, errno.EROFS): 1}


@pytest.mark.parametrize(
    ("name", "arguments"), [
        ("getxattr", (ROOT, b"user.x", Caller())), ("listxattr", (ROOT, Caller())), ("flush", (1,)),
        ("fsync", (1, True)), ("fsyncdir", (1, True)),
    ],
)  # fmt: skip
async def test_what_the_kernel_should_stop_asking_is_enosys(name, arguments):
    async with mounted() as m:
        with fails(errno.ENOSYS):
            await getattr(m.ops, name)(*arguments)


@pytest.mark.logs("step 0 slice 0 cannot be read: .*0.tgb: broken")
@pytest.mark.parametrize("kind", [CorruptError, ArchivedError])
async def test_a_corrupt_or_archived_slice_is_eio_for_that_file_alone(caplog, kind):
    async with mounted() as m:
        m.commit()
        m.slices.read_error = kind("broken")
        with fails(errno.EIO):
            await m.read("step-000000000", "rank-00000.pt")
        m.slices.read_error = None
        assert await m.read("step-000000000", "rank-00001.pt") == payload(0, 1)
        assert m.table.make_entry(0).tgb.key in caplog.text


@pytest.mark.logs("step 0 slice 0 cannot be read: .*: away")
async def test_after_a_deadline_the_kernels_page_by_page_retries_do_not_each_wait_again(autojump_clock):
    async with mounted() as m:
        m.commit()
        inode = (await m.lookup("step-000000000", "rank-00000.pt")).st_ino
        opened = await m.ops.open(inode, 0, Caller())
        m.slices.read_error = StoreUnreachableError("away")
        with fails(errno.ETIMEDOUT):
            await m.ops.read(opened.fh, 0, 1)
        m.slices.read_error = None
        with fails(errno.ETIMEDOUT):
            await m.ops.read(opened.fh, 0, 1)
        await trio.sleep(3)
        assert bytes(await m.ops.read(opened.fh, 0, 1)) == payload(0, 0)[:1]


@pytest.mark.logs("read.* failed unexpectedly")
async def test_a_short_buffer_from_below_is_never_padded_with_zeros():
    async with mounted() as m:
        m.commit()
        inode = (await m.lookup("step-000000000", "rank-00000.pt")).st_ino
        opened = await m.ops.open(inode, 0, Caller())
        m.files.get(opened.fh).handle.length += 1
        with fails(errno.EIO):
            await m.ops.read(opened.fh, 0, 1 << 20)
        assert m.meter.faults == 1
