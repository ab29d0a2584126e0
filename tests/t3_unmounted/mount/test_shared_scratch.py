"""Cache directories and logs below a directory that everybody writes to: what strangers plant there is never touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepfs.data.disk import DiskCache
from stepfs.errors import RefusedError
from stepfs.mount import daemon
from stepfs.mount.host import cache_directory
from stepfs.mount.options import MountOptions

LAKE, OTHER = "a" * 32, "b" * 32
STRANGER = 12345
MIB = 1 << 20


@pytest.fixture
def scratch(tmp_path):
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.mkdir(mode=0o755)
    (path / "thesis.tex").write_text("years")
    os.chown(path, STRANGER, STRANGER)
    return path


def plant(scratch, lake_id, victim):
    """What a stranger prepares for the next root mount of a lake."""
    token = scratch / lake_id / ("0" * 16)
    token.mkdir(parents=True)
    (token / "lock").touch()
    (token / "slices").symlink_to(victim)
    for path in (token, token.parent):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o777)
    os.utime(token, (0, 0))
    return token


def untouched(victim):
    return (victim / "thesis.tex").read_text() == "years" and victim.stat().st_mode & 0o777 == 0o755


def test_a_planted_cache_is_passed_over_for_a_fresh_one_beside_it(scratch, victim):
    token = plant(scratch, LAKE, victim)
    with cache_directory.claim(scratch, LAKE) as mine:
        assert not mine.adopted
        assert mine.path.parent.name.startswith(f"{LAKE}-")
        assert mine.path.parent.stat().st_mode & 0o777 == 0o700
        DiskCache(mine.path, LAKE, limit=MIB).close()
    assert untouched(victim)
    assert (token / "slices").is_symlink()
    assert [path.name for path in scratch.iterdir()] == [LAKE]


def test_what_was_planted_for_other_lakes_is_not_swept(scratch, victim):
    token = plant(scratch, OTHER, victim)
    with cache_directory.claim(scratch, LAKE):
        pass
    assert untouched(victim)
    assert (token / "slices").is_symlink()


def test_a_fresh_directory_beside_a_strangers_is_adopted_after_a_crash(scratch, victim):
    plant(scratch, LAKE, victim)
    crashed = cache_directory.claim(scratch, LAKE)
    (crashed.path / "slice").write_bytes(b"kept")
    crashed.release()
    with cache_directory.claim(scratch, LAKE) as again:
        assert again.adopted
        assert (again.path / "slice").read_bytes() == b"kept"


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_directory_is_passed_over(scratch, victim, what):
    if what == "link":
        (scratch / LAKE).symlink_to(victim)
    else:
        (scratch / LAKE).touch()
    with cache_directory.claim(scratch, LAKE) as mine:
        assert mine.path.is_dir()
        assert mine.path.parent.name.startswith(f"{LAKE}-")
    assert untouched(victim)


def test_a_token_that_others_may_enter_is_not_adopted(scratch):
    crashed = cache_directory.claim(scratch, LAKE)
    crashed.path.chmod(0o770)
    crashed.release()
    with cache_directory.claim(scratch, LAKE) as mine:
        assert not mine.adopted


def test_a_link_in_place_of_the_lock_is_not_followed(scratch, victim):
    crashed = cache_directory.claim(scratch, LAKE)
    crashed.release()
    (crashed.path / "lock").unlink()
    (crashed.path / "lock").symlink_to(victim / "thesis.tex")
    with cache_directory.claim(scratch, LAKE) as mine:
        assert not mine.adopted
    assert untouched(victim)


def test_slices_behind_a_link_are_refused_not_cleared(tmp_path, victim):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine/slices").symlink_to(victim)
    with pytest.raises(RefusedError, match="choose another --cache-dir"):
        DiskCache(tmp_path / "mine", LAKE, limit=MIB)
    assert untouched(victim)


def test_a_directory_that_was_renamed_under_the_cache_still_gets_the_files(tmp_path, victim):
    """Who may write to the parent can exchange the directory; what is in the old one stays where the cache put it."""
    disk = DiskCache(tmp_path / "mine", LAKE, limit=MIB)
    (tmp_path / "mine/slices").rename(tmp_path / "moved")
    (tmp_path / "mine/slices").symlink_to(victim)
    (tmp_path / "moved" / "x").touch()
    disk.remove(["x", "thesis.tex"])
    assert not (tmp_path / "moved" / "x").exists()
    assert untouched(victim)
    disk.close()


@pytest.mark.parametrize("planted", ["link", "fifo", "stranger's file"])
def test_a_log_that_is_not_ours_is_not_written(tmp_path, victim, monkeypatch, planted):
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    options = MountOptions("file:///lake", tmp_path / "m")
    log = daemon.log_file(options.directory)
    log.parent.mkdir()
    if planted == "link":
        log.symlink_to(victim / "thesis.tex")
    elif planted == "fifo":
        os.mkfifo(log)
    else:
        log.touch()
        os.chown(log, STRANGER, STRANGER)
    with pytest.raises(RefusedError, match="set STEPFS_LOG_DIR"):
        daemon.start(options)
    assert untouched(victim)


def test_a_log_directory_that_cannot_be_made_names_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "file/logs"))
    with pytest.raises(RefusedError, match="set STEPFS_LOG_DIR"):
        daemon.start(MountOptions("file:///lake", Path(tmp_path / "m")))
