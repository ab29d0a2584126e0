"""The end of a mount as the event loop of pyfuse3 reports it, and as the daemon notices that its mount is detached."""

from __future__ import annotations

import errno
import select
import threading

import pytest
import trio

from stepfs.mount import session
from stepfs.mount.fuse import kernel
from stepfs.mount.host import mounts


def end(text: str = "fuse_session_receive_buf failed with Software caused connection abort") -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, text)


def main_that_raises(monkeypatch, error: Exception) -> None:
    async def main(*, min_tasks: int, max_tasks: int) -> None:
        raise ExceptionGroup("of its nursery", [ExceptionGroup("of a nursery in it", [error])])

    monkeypatch.setattr("pyfuse3.main", main)


async def test_a_request_that_was_being_read_at_unmount_is_no_fault(monkeypatch):
    """The kernel then says ECONNABORTED, not ENODEV: once in 3,293 unmounts of a mount with three busy readers."""
    main_that_raises(monkeypatch, end())
    await kernel.answer()


async def test_a_fault_beside_it_is_told_alone(monkeypatch):
    main_that_raises(monkeypatch, ExceptionGroup("two", [end(), ValueError("a fault of a handler")]))
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await kernel.answer()


@pytest.mark.parametrize("error", [end("an endpoint went away"), OSError(errno.EBADF, "receive_buf")])
async def test_an_error_of_a_handler_is_a_fault(monkeypatch, error):
    main_that_raises(monkeypatch, error)
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        await kernel.answer()


OURS = "90 22 0:53 / /mnt/a ro,nosuid shared:1 - fuse.stepfs s3://b/p ro\n"
OTHERS = "".join(
    f"{number} 22 0:{number} / /mnt/{number} rw shared:{number} - tmpfs 0:53 rw\n" for number in range(100, 5100)
)


class Table:
    """A mount table that changes while somebody polls it; counts how often it is read, and in which threads."""

    def __init__(self, monkeypatch, path):
        self.path = path
        self.reads = []
        self.changes = []  # contents to come, one per poll; None: the poll ends without a change
        monkeypatch.setattr(mounts, "_MOUNTINFO", self)
        monkeypatch.setattr(select, "poll", lambda: self)

    def open(self, mode, *, buffering=-1):
        assert (mode, buffering) == ("rb", 0)
        self.reads.append(threading.current_thread())
        return self.path.open(mode, buffering=buffering)

    def register(self, file, events):
        assert events & select.POLLPRI

    def poll(self, timeout_ms):
        assert timeout_ms > 0
        content = self.changes.pop(0)
        if content is not None:
            self.path.write_text(content)


@pytest.fixture
def table(tmp_path, monkeypatch):
    made = Table(monkeypatch, tmp_path / "mountinfo")
    made.path.write_text(OTHERS + OURS)
    return made


def test_it_waits_through_changes_of_other_mounts_until_its_own_is_gone(table):
    table.changes = [OURS + OTHERS, None, OURS, OURS.replace("/mnt/a", "/mnt/elsewhere"), OTHERS]
    mounts.wait_until_detached("0:53")
    assert table.changes == []


@pytest.mark.parametrize("content", ["", OTHERS, OURS.replace("0:53", "0:5"), OURS.replace("0:53", "10:53")])
def test_a_mount_that_is_gone_already_is_not_waited_for(table, content):
    table.path.write_text(content)
    mounts.wait_until_detached("0:53")


async def test_the_loop_neither_reads_nor_parses_the_table(table, monkeypatch):
    def refuse():
        raise AssertionError("5,000 mounts take 11 ms to parse")

    monkeypatch.setattr(mounts, "mounts", refuse)
    table.changes = [OURS, OTHERS]
    with trio.CancelScope() as background:
        await session._until_detached(background, "0:53")
        await trio.sleep_forever()
    assert background.cancelled_caught
    assert table.reads
    assert threading.current_thread() not in table.reads
