"""A guardian that is killed is replaced; until then and after it the mount serves on, and readers are freed as before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from realmount import gone, make_lake, mounted, payload, produce, until


def guardian_of(pid):
    """The daemon's only child; None while there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def test_a_killed_guardian_is_replaced_and_the_next_one_frees_readers(file_url, tmp_path):
    make_lake(file_url)
    produce(file_url, 3)
    with mounted(file_url, tmp_path / "m", allowed=["starting another"]) as mount:
        first = guardian_of(mount.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: guardian_of(mount.pid) not in {None, first}, "no other guardian")
        assert mount.file(1, 1).read_bytes() == payload(1, 1)
        second = guardian_of(mount.pid)
        os.kill(second, signal.SIGTERM)  # meant for daemons: a guardian ends with its own
        mount.kill(signal.SIGKILL)
        gone(mount.pid)
        gone(second)
        with pytest.raises(OSError, match=r"not connected|abort"):  # a thread may still be closing the device
            os.listdir(mount.directory)
