"""Handlers without a kernel: names, attributes, listings, counts of lookups, and what no rank has."""

from __future__ import annotations

import errno
import os

import pyfuse3
import pytest
from fakemount import ROOT, Caller, facts, fails, mounted
from faketable import CREATED_MS, payload

from stepfs.format.grid import Grid
from stepfs.view.names import Fixed, directory_inode, slice_inode


async def test_a_committed_step_is_a_directory_with_one_file_per_slice():
    async with mounted() as m:
        m.commit(2)
        assert await m.names() == [".stepfs", "step-000000000", "step-000000001"]
        assert await m.names("step-000000001") == ["rank-00000.pt", "rank-00001.pt"]
        found = await m.lookup("step-000000001", "rank-00001.pt")
        data = payload(1, 1)
        assert (found.st_ino, found.st_size, found.st_mode) == (slice_inode(1, 1), len(data), 0o100444)
        assert found.st_mtime_ns == (CREATED_MS + 2000) * 1_000_000
        assert await m.read("step-000000001", "rank-00001.pt") == data
        assert m.slices.opened == [(1, 1)]


async def test_what_is_not_committed_is_not_there_at_once():
    async with mounted() as m:
        m.commit(1)
        with fails(errno.ENOENT):
            await m.lookup("step-000000001")
        with fails(errno.ENOENT):
            await m.lookup("step-0")
        assert m.waits.waiting == 0


@pytest.mark.parametrize("name", ["rank-00002.pt", "rank-0.pt", "rank-00000.npy", "x", ".git", "rank-00000.pt.tmp"])
async def test_names_that_no_rank_has_are_absent(name):
    async with mounted() as m:
        m.commit()
        with fails(errno.ENOENT):
            await m.lookup("step-000000000", name)


async def test_ranks_of_a_world_are_hard_links_to_their_slice():
    async with mounted(world=8, slices=2) as m:
        m.commit()
        names = await m.names("step-000000000")
        assert names == [f"rank-{rank:05d}.pt" for rank in range(8)]
        found = [await m.lookup("step-000000000", name) for name in names]
        assert [f.st_ino for f in found] == [slice_inode(0, rank // 4) for rank in range(8)]
        assert {f.st_nlink for f in found} == {4}


@pytest.mark.parametrize("steps", [None, range(1)])
async def test_the_micro_batches_of_a_rank_are_files_of_the_slices_inodes_for_every_mesh(steps):
    for mesh, files in (("dp=8", 1), ("tp=2,dp=4", 2), ("dp=2", 4), ("dp=1,cp=2", 8)):
        async with mounted(steps=steps, mesh=mesh, slices=Grid(4, micro=2)) as m:
            for committed in (0, 1):
                m.commit(committed)
                if steps is None and not committed:
                    continue
                m.listing_room = 3  # a listing goes on where it stopped
                names = await m.names("step-000000000")
                found = [await m.lookup("step-000000000", name) for name in names]
                peers = len(names) // 8
                assert {f.st_nlink for f in found} == {peers}
                of_rank_0 = [f.st_ino for name, f in zip(names, found, strict=True) if "rank-00000" in name]
                assert of_rank_0 == [slice_inode(0, index) for index in range(files)]
                assert {f.st_ino for f in found} == {slice_inode(0, index) for index in range(8)}
                own = [name for name in names if name.startswith("rank-00000.")]
                assert own == (
                    [f"rank-00000.micro-{n:04d}.pt" for n in range(files)] if files > 1 else ["rank-00000.pt"]
                )
            with fails(errno.ENOENT):
                await m.lookup("step-000000000", f"rank-00000.micro-{files:04d}.pt")


async def test_latest_follows_the_newest_step():
    async with mounted() as m:
        with fails(errno.ENOENT):
            await m.lookup("latest")
        m.commit(3)
        found = await m.lookup("latest")
        assert await m.ops.readlink(found.st_ino, Caller()) == b"step-000000002"
        assert (found.st_size, found.entry_timeout) == (14, 0.0)
        m.commit()
        assert await m.ops.readlink(found.st_ino, Caller()) == b"step-000000003"
        assert "latest" not in await m.names(), "else whatever walks reads the newest step twice"


async def test_under_steps_exactly_these_are_listed_always_and_there_is_no_latest():
    async with mounted(steps=range(2, 5)) as m:
        expected = [".stepfs", "step-000000002", "step-000000003", "step-000000004"]
        assert await m.names() == expected
        m.commit(9)
        assert await m.names() == expected
        m.table.first_live_step = 4
        assert await m.names() == expected
        assert len(await m.names("step-000000002")) == 2  # reclaimed: names, but nothing to open
        assert (await m.lookup("step-000000002", "rank-00000.pt")).st_size == 0
        with fails(errno.ENOENT):
            await m.read("step-000000002", "rank-00000.pt")
        with fails(errno.ENOENT):
            await m.lookup("step-000000002", "rank-00002.pt")
        with fails(errno.ENOENT):
            await m.lookup("step-000000005")
        assert len(await m.names("step-000000004")) == 2


async def test_show_last_trims_listings_but_not_lookups():
    async with mounted(show_last=2, list_latest=True) as m:
        m.commit(5)
        assert await m.names() == [".stepfs", "latest", "step-000000003", "step-000000004"]
        assert await m.read("step-000000000", "rank-00000.pt") == payload(0, 0)


@pytest.mark.parametrize("room", [1, 2, 3, 204])
async def test_a_listing_continues_where_the_kernel_stopped_reading(room):
    async with mounted(list_latest=True) as m:
        m.commit(500)
        m.listing_room = room
        names = await m.names()
        assert names == [".stepfs", "latest", *(f"step-{n:09d}" for n in range(500))]
        assert len(m.known) == 500


async def test_a_listing_shows_one_moment_and_never_what_has_left_meanwhile():
    async with mounted(list_latest=True) as m:
        m.commit(10)
        m.listing_room = 4
        handle = await m.ops.opendir(ROOT, Caller())
        await m.ops.readdir(handle, 0, None)
        assert [n for n, _, _ in m.listed][-1] == b"step-000000001"
        last = m.listed[-1][2]
        m.commit(10)
        m.table.first_live_step = 5
        m.listed.clear()
        m.listing_room = 100
        await m.ops.readdir(handle, last, None)
        assert [n for n, _, _ in m.listed] == [b"step-%09d" % n for n in range(5, 10)]
        m.listed.clear()
        await m.ops.readdir(handle, 0, None)  # rewinddir: a new listing
        assert [n for n, _, _ in m.listed][-1] == b"step-000000019"


@pytest.mark.parametrize("options", [{}, {"steps": range(3, 1700)}, {"show_last": 900}, {"wait_s": 9}])
@pytest.mark.parametrize("reclaimed", [0, 700])
async def test_a_listing_says_of_each_entry_what_a_lookup_says(options, reclaimed):
    async with mounted(**options) as m:
        m.commit(1500)
        m.table.unload(2)
        m.table.first_live_step = reclaimed
        m.listing_room = 204
        names = await m.names()
        assert len(names) > 800
        for name in names:
            assert m.rows[name] == facts(await m.lookup(name)), name
        assert len(m.known) == len(names) - 1


async def test_dots_resolve_for_file_handles_that_come_back():
    async with mounted() as m:
        m.commit()
        inode = slice_inode(0, 1)
        assert (await m.ops.lookup(inode, b".", Caller())).st_ino == inode
        assert (await m.ops.lookup(inode, b"..", Caller())).st_ino == directory_inode(0)
        assert (await m.ops.lookup(directory_inode(0), b"..", Caller())).st_ino == ROOT
        assert (await m.ops.lookup(Fixed.WAIT, b"..", Caller())).st_ino == Fixed.CONTROL


@pytest.mark.parametrize("inode", [0, 15, 1 << 19, 1 << 63, 2**64 - 1, slice_inode(0, 7), slice_inode(9, 0)])
async def test_inodes_that_nobody_has_are_enoent(inode):
    async with mounted() as m:
        m.commit()
        with fails(errno.ENOENT):
            await m.ops.getattr(inode, Caller())
        with fails(errno.ENOENT):
            await m.ops.open(inode, 0, Caller())


async def test_lookup_counts_of_directories_balance():
    async with mounted() as m:
        m.commit(3)
        await m.names()
        await m.lookup("step-000000001")
        await m.lookup("step-000000001", "rank-00000.pt")
        assert list(m.known.between(0, 10)) == [0, 1, 2]
        await m.ops.forget([(directory_inode(0), 1), (directory_inode(1), 2), (slice_inode(1, 0), 1), (ROOT, 5)])
        assert list(m.known.between(0, 10)) == [1, 2]
        await m.ops.forget([(directory_inode(1), 1)])
        assert list(m.known.between(0, 10)) == [2]


async def test_statfs_tells_sizes_and_no_room():
    async with mounted() as m:
        m.commit(4)
        data = await m.ops.statfs(Caller())
        assert (data.f_files, data.f_bfree, data.f_namemax) == (12, 0, 255)


async def test_access_is_reading_only():
    async with mounted() as m:
        assert await m.ops.access(ROOT, os.R_OK | os.X_OK, Caller())
        assert not await m.ops.access(ROOT, os.W_OK, Caller())


async def test_every_handler_of_the_interface_is_guarded_once():
    async with mounted() as m:
        for name in dir(pyfuse3.Operations):
            handler = getattr(type(m.ops), name)
            if name.startswith("_") or name in {"init", "stacktrace"} or not callable(handler):
                continue
            assert handler.__code__.co_name == "guard", name
            assert not hasattr(handler.__wrapped__, "__wrapped__"), name
