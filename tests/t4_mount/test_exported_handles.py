"""File handles as an NFS export uses them: name_to_handle_at, and open_by_handle_at where the inode is not known yet."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

import pytest
from realmount import make_lake, mounted, produce, stepfs, until

_AT_FDCWD = -100
_HANDLE_BYTES = 128
_libc = ctypes.CDLL(None, use_errno=True)


def handle_of(path: Path) -> bytes:
    buffer = ctypes.create_string_buffer(struct.pack("Ii", _HANDLE_BYTES, 0), 8 + _HANDLE_BYTES)
    mount_id = ctypes.c_int()
    if _libc.name_to_handle_at(_AT_FDCWD, bytes(path), buffer, ctypes.byref(mount_id), 0) != 0:
        raise OSError(ctypes.get_errno(), "name_to_handle_at", str(path))
    return buffer.raw


def read_by_handle(mount: Path, handle: bytes) -> bytes:
    directory = os.open(mount, os.O_RDONLY)
    try:
        descriptor = _libc.open_by_handle_at(
            directory, ctypes.create_string_buffer(handle, len(handle)), os.O_RDONLY
        )
        if descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(directory)
    with open(descriptor, "rb") as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="open_by_handle_at is root's")
def test_a_handle_outlives_the_mount_that_gave_it_and_ends_with_its_step(tmp_path: Path) -> None:
    """Another mount of the lake stands for a server that was started again."""
    url = f"file://{tmp_path}/lake"
    make_lake(url)
    batches = produce(url, 8)
    with mounted(url, tmp_path / "a") as first:
        handles = [handle_of(first.file(step, 1)) for step in range(8)]
    with mounted(url, tmp_path / "b", "--group", "g") as second:
        assert read_by_handle(second.directory, handles[5]) == batches[5][1]
        assert read_by_handle(second.directory, handles[1]) == batches[1][1]
        assert stepfs("checkpoint", second.directory, "--group", "g", "4").returncode == 0
        until(lambda: "step-000000003" not in second.steps(), "the checkpoint to be followed")
        for step in (0, 1, 3):
            with pytest.raises(OSError, match="tale") as raised:
                read_by_handle(second.directory, handles[step])
            assert raised.value.errno == errno.ESTALE
        assert read_by_handle(second.directory, handles[5]) == batches[5][1]
