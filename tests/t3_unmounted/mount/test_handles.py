"""What a daemon can do with handles of another one, and what it tells the next: no kernel, no second process."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import pyfuse3
import pytest
import trio
from fakemount import ROOT, Caller, fails, mounted
from faketable import payload
from hypothesis import given
from hypothesis import strategies as st

from stepfs.data.slices import Slices
from stepfs.format.ids import SliceIndex, Step
from stepfs.mount.fuse.files import FileTable, Handles, OpenContent, OpenSlice, inode_of, length_of
from stepfs.mount.fuse.guard import Shares
from stepfs.mount.fuse.operations import PendingSizes
from stepfs.view.inodes import (
    SLICES_SERVED_MAX,
    STEP_MAX,
    Fixed,
    directory_inode,
    slice_inode,
    step_file_inode,
    wait_file_inode,
)

STEPS = st.integers(0, STEP_MAX).map(Step)
INODES = st.one_of(
    st.sampled_from([int(fixed) for fixed in Fixed]),
    STEPS.map(directory_inode),
    st.builds(slice_inode, STEPS, st.integers(0, SLICES_SERVED_MAX - 1).map(SliceIndex)),
    STEPS.map(step_file_inode),
    STEPS.map(wait_file_inode),
)


@given(st.lists(st.tuples(INODES, st.booleans(), st.integers(0, (1 << 37) - 1)), max_size=20), st.integers(0, 1 << 40))
def test_a_handle_names_its_inode_to_a_daemon_that_never_saw_the_open(opens, generation):
    table: Handles[int] = Handles(Shares(1 << 60, errno.EMFILE))
    table.generation = generation
    made: dict[int, int] = {}
    for inode, own, length in opens:
        handle = table.add(inode, inode, own=own, length=length)
        assert 0 < handle < 1 << 64
        assert made.setdefault(handle, inode) == inode
        assert inode_of(handle) == inode
        if inode < 1 << 20:
            assert length_of(handle) == length
    assert len(table) == len(opens)
    for handle in [handle for handle, opened in table.opened.items() for _ in opened]:
        assert table.pop(handle) == made[handle]
    assert not table.opened
    assert len(table) == 0


def test_two_open_contents_never_share_a_handle_nor_do_those_of_two_daemons():
    first, second = FileTable(), FileTable()
    second.follow(1)
    handles = [table.add(Fixed.STATUS, OpenContent(b"x"), length=1) for table in (first, second) for _ in range(1000)]
    assert len(set(handles)) == len(handles)
    full = FileTable()
    held = full.add(Fixed.STATUS, OpenContent(b"old"), length=3)
    for _ in range(3 << 12):  # its turn comes again while it is open
        other = full.add(Fixed.STATUS, OpenContent(b"new"), length=3)
        assert other != held
        full.release(other)


async def test_what_is_told_of_a_step_is_the_same_content_while_anybody_has_it_open():
    table = FileTable()
    first, second = (OpenContent(bytes([65 + n])) for n in range(2))
    handles = {table.add(step_file_inode(Step(3)), each) for each in (first, second)}
    assert len(handles) == 1
    assert table.get(*handles) is first
    for _ in range(2):
        table.release(*handles)
    assert not table.opened
    assert table.get(table.add(step_file_inode(Step(3)), second)) is second


@pytest.mark.parametrize("name", ["", ".stepfs", ".stepfs/status.json", ".stepfs/steps"])
async def test_a_user_who_opens_one_name_again_and_again_is_refused_and_nobody_else(name):
    path = name.split("/") if name else []
    async with mounted() as m:
        m.commit()
        inode = (await m.lookup(*path)).st_ino
        is_directory = not name or name in {".stepfs", ".stepfs/steps"}

        async def opened(uid: int) -> int:
            handler = m.ops.opendir(inode, Caller(uid=uid)) if is_directory else m.ops.open(inode, 0, Caller(uid=uid))
            found = await handler
            return found if is_directory else found.fh

        held = []
        with fails(errno.EMFILE):
            while len(held) < 1 << 12:
                held.append(await opened(uid=65534))
        assert len(set(held)) == len(held) > 500
        if not is_directory:  # what he holds keeps him from no listing
            await m.ops.releasedir(await m.ops.opendir(ROOT, Caller(uid=65534)))
        for uid in (0, 1000):
            other = await opened(uid)
            assert other not in held
            await (m.ops.releasedir if is_directory else m.ops.release)(other)
        await (m.ops.releasedir if is_directory else m.ops.release)(held.pop())
        await opened(uid=65534)  # as many as before


async def test_long_contents_that_stay_open_are_bounded_in_bytes():
    table = FileTable()
    with pytest.raises(pyfuse3.FUSEError):
        for _ in range(1000):
            table.add(Fixed.ACCESSLOG, OpenContent(b""), length=1 << 20, uid=1000)
    assert 32 < len(table) <= 64


async def test_a_slice_that_another_daemon_opened_is_read_and_closed_like_an_own_one():
    async with mounted() as old, mounted() as new:
        for m in (old, new):
            m.commit(2)
        inode = (await old.lookup("step-000000001", "rank-00001.pt")).st_ino
        fh = (await old.ops.open(inode, os.O_RDONLY, Caller())).fh
        assert bytes(await new.ops.read(fh, 1, 4)) == payload(1, 1)[1:5]
        assert bytes(await new.ops.read(fh, 0, 100)) == payload(1, 1)
        assert new.slices.open_handles == 1
        await new.ops.release(fh)
        await new.ops.release(fh)  # the same descriptor again: opened twice before
        assert new.slices.open_handles == 0
        assert not new.files.in_use()


async def test_contents_that_another_daemon_made_are_never_mixed_with_new_ones():
    async with mounted() as old, mounted() as new:
        old.commit(1)
        new.commit(2)
        fh = (await old.ops.open(Fixed.STATUS, os.O_RDONLY, Caller())).fh
        content = bytes(await old.ops.read(fh, 0, 100))
        with fails(errno.EIO):
            await new.ops.read(fh, 3, 100)
        assert bytes(await new.ops.read(fh, len(content), 100)) == b""  # it had read all
        step = (await old.ops.open(step_file_inode(0), os.O_RDONLY, Caller())).fh
        with fails(errno.EIO):
            await new.ops.read(step, 1, 100)
        assert bytes(await new.ops.read(step, 7, 100)) == b""
        wait = (await old.ops.open(wait_file_inode(0), os.O_RDONLY, Caller())).fh
        assert bytes(await new.ops.read(wait, 5, 100)) == b"000000000\n"
        assert bytes(await new.ops.read(fh, 0, 100)) == b"next 2\n"  # from the beginning: a new one
        assert bytes(await new.ops.read(fh, 5, 100)) == b"2\n"


async def test_what_two_daemons_in_a_row_made_shorter_is_read_to_its_end_at_the_third():
    async with mounted() as first, mounted() as second, mounted() as third:
        first.commit(10)
        second.commit(1)
        fh = (await first.ops.open(Fixed.STATUS, os.O_RDONLY, Caller())).fh
        content = bytes(await second.ops.read(fh, 0, 100))
        assert content.rstrip() == b"next 1"
        assert bytes(await third.ops.read(fh, len(content), 100)) == b""
        fh = (await second.ops.open(Fixed.STATUS, os.O_RDONLY, Caller())).fh
        content = bytes(await first.ops.read(fh, 0, 100))
        assert content == b"next 10\n"
        assert bytes(await third.ops.read(fh, len(content), 100)) == b""


async def test_a_daemon_that_takes_over_has_contents_and_files_as_they_were_and_goes_on_with_listings():
    async with mounted() as old, mounted() as new:
        old.commit(5)
        new.commit(9)
        old.listing_room = 3
        status = (await old.ops.open(Fixed.STATUS, os.O_RDONLY, Caller())).fh
        inode = slice_inode(2, 1)
        slices = [(await old.ops.open(inode, os.O_RDONLY, Caller())).fh for _ in range(2)]
        root = await old.ops.opendir(ROOT, Caller())
        await old.ops.readdir(root, 0, None)
        last = old.listed[-1][2]
        new.ops.inherit(old.files.estate())
        assert bytes(await new.ops.read(status, 0, 100)) == b"next 5\n"
        await new.ops.readdir(root, last, None)
        assert [name for name, _, _ in new.listed] == [b"step-%09d" % n for n in range(2, 9)]
        assert (len(new.files), new.slices.open_handles) == (3, 2)
        for fh in (*slices, status):
            await new.ops.release(fh)
        await new.ops.releasedir(root)
        assert not new.files.in_use()


async def test_a_listing_that_another_daemon_began_goes_on_to_its_end():
    """After that one's death: an id beyond 0 is never answered from an empty range."""
    async with mounted() as old, mounted() as new:
        for m in (old, new):
            m.commit(5)
        root = await old.ops.opendir(ROOT, Caller())
        await new.ops.readdir(root, 4, None)
        assert [name for name, _, _ in new.listed] == [b"step-%09d" % n for n in range(2, 5)]


@pytest.mark.logs("the store did not deliver")
async def test_what_waits_is_answered_although_the_reading_is_cancelled(autojump_clock):
    """Each way in which a handler waits; one outside the shelter would end here unanswered."""
    async with mounted(steps=range(5)) as m:
        m.commit(2)
        m.files.close_door()
        m.table.unloaded, m.table.load_gate = {0}, trio.Event()
        slices = Slices(None, memory_bytes=1 << 20, deadline_s=2)  # type: ignore[arg-type]  # nothing comes
        slices.shelter = m.slices.shelter
        m.files.put(
            1 << 1,
            OpenSlice(slices.open(m.table.make_entry(0), SliceIndex(0)), m.table.make_entry(0), SliceIndex(0), 0),
        )
        inode = (await m.lookup("step-000000002", "rank-00000.pt")).st_ino
        answered = []

        async def ask(name, ask_for):
            with suppress(pyfuse3.FUSEError):
                await ask_for
            answered.append(name)

        requests = {
            "open": m.ops.open(inode, os.O_RDONLY, Caller()),
            "door": m.ops.open(slice_inode(1, 0), os.O_RDONLY, Caller()),
            "lookup": m.ops.lookup(directory_inode(0), b"rank-00000.pt", Caller()),
            "opendir": m.ops.opendir(directory_inode(0), Caller()),
            "wait": m.ops.open(wait_file_inode(3), os.O_RDONLY, Caller()),
            "facts": m.ops.open(step_file_inode(0), os.O_RDONLY, Caller()),
            "again": m.ops.read(slice_inode(0, 1) << 1, 0, 1),
            "listing": m.ops.readdir(directory_inode(0) << 1, 0, None),
            "read": m.ops.read(1 << 1, 0, 1),
        }
        with trio.CancelScope() as reading:
            async with trio.open_nursery() as nursery:
                for name, request in requests.items():
                    nursery.start_soon(ask, name, request)
                await trio.testing.wait_all_tasks_blocked()
                assert not answered
                m.slices.shelter.close()
                reading.cancel()
                m.later(1, m.table.load_gate.set)
                m.later(1, m.commit, 3)
        assert sorted(answered) == sorted(requests)


async def test_a_shelter_that_opens_again_lets_its_waits_end():
    async with mounted() as m:
        shelter = m.slices.shelter
        shelter.close()
        async with trio.open_nursery() as nursery:

            async def wait():
                with shelter.wait():
                    await trio.sleep_forever()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            shelter.close(False)


async def test_after_a_death_each_file_may_be_one_that_the_kernel_takes_for_empty():
    told = []
    sizes = PendingSizes(lambda inode, offset, data: told.append((inode, offset, bytes(data))))

    async def last_byte():
        return b"x"

    assert not sizes.has(1)
    sizes.doubt()
    for _ in range(2):
        if sizes.has(1):
            await sizes.settle(1, 8, last_byte)
    assert told == [(1, 7, b"x")]
    sizes.forget(1)  # and it looks the name up again, whose size is known now: once more does no harm
    assert sizes.has(1)


async def test_an_open_that_waits_is_counted_by_the_daemon_that_answers_it():
    """The kernel has the next one answer it, if this one does not: counted here, too, it would never be closed."""
    async with mounted(steps=range(5)) as m:
        inode = (await m.lookup("step-000000003", "rank-00000.pt")).st_ino
        m.commit(5)
        seen = []
        m.ops.sizes._store = lambda *_: seen.extend(m.files.estate())
        fh = (await m.ops.open(inode, os.O_RDONLY, Caller())).fh
        assert seen == []
        assert m.files.estate() == [(fh, 1, None)]
