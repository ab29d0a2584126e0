"""Every operation of the kernel on directories, files, files to come, and handles."""

from __future__ import annotations

import errno
import os

import pyfuse3
import pytest
import trio
from fakemount import ROOT, Caller, facts, fails, mounted
from faketable import CREATED_MS, payload

from stepfs.errors import ArchivedError, CorruptError, RefusedError, StoreUnreachableError
from stepfs.format.grid import Grid
from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.lake.origins import OriginLostError
from stepfs.mount.fuse.guard import CHANGES
from stepfs.mount.fuse.operations import PendingSizes
from stepfs.view.inodes import Fixed, directory_inode, slice_inode


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


@pytest.mark.parametrize("room", [1, 2, 3, 204])
async def test_a_listing_continues_where_the_kernel_stopped_reading(room):
    async with mounted() as m:
        m.commit(500)
        m.listing_room = room
        names = await m.names()
        assert names == [".stepfs", *(f"step-{n:09d}" for n in range(500))]
        assert len(m.known) == 500


async def test_a_listing_shows_one_moment_and_never_what_has_left_meanwhile():
    async with mounted() as m:
        m.commit(10)
        m.listing_room = 3
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


@pytest.mark.parametrize("options", [{}, {"steps": range(3, 1700)}, {"steps": range(900)}, {"wait_s": 9}])
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
        with fails(errno.EIO):  # as if another daemon had opened it, and its step were gone
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
@pytest.mark.parametrize("kind", [CorruptError, ArchivedError, OriginLostError, RefusedError])
async def test_a_slice_that_cannot_be_had_is_eio_for_that_file_alone(caplog, kind):
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
