"""What commands say to type next can be typed, and commands that read a lake take a directory it is mounted on."""

from __future__ import annotations

import re
import shlex

import pytest
from realmount import lake_with, mounted, stepfs


@pytest.fixture
def lake(tmp_path):
    url = (tmp_path / "a lake").as_uri().replace("%20", " ")
    lake_with(url, 3)
    return url


def test_ls_and_verify_take_a_mount(lake, tmp_path):
    with mounted(lake, tmp_path / "m") as mount:
        for command in (["ls"], ["ls", "--json"], ["ls", "--step", "1", "--json"], ["verify"]):
            of_lake = stepfs(*command, lake)
            of_mount = stepfs(*command, mount.directory)
            assert (of_mount.returncode, of_mount.stdout) == (0, of_lake.stdout), of_mount.stderr
            assert of_lake.stdout


def test_a_checkpoint_that_was_not_recorded_comes_with_the_command_that_does_it(lake, tmp_path):
    """The lake is not there when the mount is gone: its URL has a space in it, and so has the group."""
    with mounted(lake, tmp_path / "m", "--group", "my run", allowed=["cannot"]) as mount:
        (tmp_path / "a lake").rename(tmp_path / "away")
        done = stepfs("unmount", mount.directory, "--checkpoint", "1")
        (tmp_path / "away").rename(tmp_path / "a lake")
        (command,) = re.findall(r"`(stepfs checkpoint .*)`", done.stderr)
        assert shlex.split(command)[1:] == ["checkpoint", lake, "--group", "my run", "1"]
        assert stepfs(*shlex.split(command)[1:]).returncode == 0
