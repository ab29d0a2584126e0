"""What tests that run beside each other do to mounts, they do to their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ownmounts
import pytest
from realmount import make_lake, mounted

SEES_MOUNTS = """
import sys
from ownmounts import enter_own_mount_namespace
from stepfs.mount.host.mountinfo import FSTYPE, mounts
assert [m for m in mounts() if m.fstype == FSTYPE]
assert enter_own_mount_namespace()
assert [m for m in mounts() if m.fstype == FSTYPE] == []
"""


def namespace_of(process: int | str) -> str:
    return os.readlink(f"/proc/{process}/ns/mnt")


def test_this_process_and_its_neighbours_do_not_see_each_others_mounts():
    may = os.geteuid() == 0
    assert (namespace_of("self") != namespace_of(os.getppid())) == may


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have a mount namespace of its own")
def test_a_process_that_runs_tests_sees_no_mount_that_was_there_before(file_url, tmp_path):
    """A copy of a neighbour's mount would be looked at, too, and soon be a dead one."""
    make_lake(file_url)
    with mounted(file_url, tmp_path / "m"):
        path = {**os.environ, "PYTHONPATH": str(Path(ownmounts.__file__).parent)}
        subprocess.run([sys.executable, "-c", SEES_MOUNTS], check=True, env=path, timeout=60)
