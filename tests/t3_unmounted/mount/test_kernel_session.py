"""The end of a mount, as the event loop of pyfuse3 reports it."""

from __future__ import annotations

import errno

import pytest

from stepfs.mount.fuse import kernel_session


def end(text: str = "fuse_session_receive_buf failed with Software caused connection abort") -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, text)


def main_that_raises(monkeypatch, error: Exception) -> None:
    async def main(*, min_tasks: int, max_tasks: int) -> None:
        raise ExceptionGroup("of its nursery", [ExceptionGroup("of a nursery in it", [error])])

    monkeypatch.setattr("pyfuse3.main", main)


async def test_a_request_that_was_being_read_at_unmount_is_no_fault(monkeypatch):
    """The kernel then says ECONNABORTED, not ENODEV: once in 3,293 unmounts of a mount with three busy readers."""
    main_that_raises(monkeypatch, end())
    await kernel_session.answer()


async def test_a_fault_beside_it_is_told_alone(monkeypatch):
    main_that_raises(monkeypatch, ExceptionGroup("two", [end(), ValueError("a fault of a handler")]))
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await kernel_session.answer()


@pytest.mark.parametrize("error", [end("an endpoint went away"), OSError(errno.EBADF, "receive_buf")])
async def test_an_error_of_a_handler_is_a_fault(monkeypatch, error):
    main_that_raises(monkeypatch, error)
    with pytest.RaisesGroup(type(error), flatten_subgroups=True):
        await kernel_session.answer()
