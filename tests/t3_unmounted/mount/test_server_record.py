"""The record of who serves a mount: what it proves, and for which mount."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from stepfs.mount.host.mountinfo import Mounted
from stepfs.mount.host.server_record import forget_server, recorded, server_is_gone

MOUNT = Mounted("0:53", "/mnt/run", "fuse.stepfs", "file:///lake", 120)
SERVE = """
import os, sys
from pathlib import Path
from stepfs.mount.host.mountinfo import Mounted
from stepfs.mount.host.server_record import recorded
with recorded(Mounted("0:53", "/mnt/run", "fuse.stepfs", "file:///lake", 120), Path(sys.argv[1])):
    os._exit(9)
"""


@pytest.fixture
def base(tmp_path):
    """The records of a daemon that was killed."""
    base = tmp_path / "stepfs"
    killed = subprocess.run([sys.executable, "-c", SERVE, str(base)], check=False)
    assert killed.returncode == 9
    return base


def test_a_killed_server_is_known_to_be_gone_until_its_mount_is_cleared(base):
    assert server_is_gone(MOUNT, base)
    forget_server(MOUNT, base)
    assert not server_is_gone(MOUNT, base)
    assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    "other", [{"mount_id": 121}, {"directory": "/mnt/other"}, {"source": "file:///other"}, {"device": "0:54"}]
)
def test_a_mount_that_got_the_number_of_a_dead_one_is_not_taken_for_it(base, other):
    assert not server_is_gone(dataclasses.replace(MOUNT, **other), base)


def test_a_live_server_is_not_gone_and_its_record_goes_with_it(tmp_path):
    with recorded(MOUNT, tmp_path / "stepfs"):
        assert not server_is_gone(MOUNT, tmp_path / "stepfs")
        forget_server(MOUNT, tmp_path / "stepfs")
        assert [path.name for path in (tmp_path / "stepfs").iterdir()] == ["0-53.json"]
    assert list((tmp_path / "stepfs").iterdir()) == []


def test_a_mount_serves_without_a_record_where_none_can_be_written(base, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (None, tmp_path / "file", tmp_path / "none/deeper"):
        with recorded(MOUNT, place):
            assert not server_is_gone(MOUNT, place)


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"mount": None}), "\x00"])
def test_a_damaged_record_proves_nothing(base, text):
    (base / "0-53.json").write_text(text)
    assert not server_is_gone(MOUNT, base)


def test_a_record_in_a_directory_that_others_may_write_proves_nothing(base):
    base.chmod(0o777)
    assert not server_is_gone(MOUNT, base)


def test_a_record_behind_a_link_proves_nothing(base, tmp_path):
    (base / "0-53.json").rename(tmp_path / "planted")
    (base / "0-53.json").symlink_to(tmp_path / "planted")
    assert not server_is_gone(MOUNT, base)
