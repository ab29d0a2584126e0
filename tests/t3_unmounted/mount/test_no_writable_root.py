"""A mount without --cache-dir writes nowhere, a user without a home has a place, and a budget beyond the limit is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepfs import limits
from stepfs.cli.commands.mount import warn_of_memory
from stepfs.mount.daemon import log_file
from stepfs.mount.host import cache_directory
from stepfs.mount.options import MountOptions

LAKE = "0" * 32


@pytest.fixture
def nobody(monkeypatch):
    """No HOME, and a uid that is in no passwd."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(os, "geteuid", lambda: 1_000_660_000)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "STEPFS_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_cache_directory_nothing_is_made(monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with cache_directory.claimed(None, LAKE) as path:
        assert not path.exists()
    assert not path.exists()


def test_with_one_it_is_claimed_and_removed(tmp_path):
    with cache_directory.claimed(tmp_path / "c", LAKE) as path:
        assert path.is_dir()
    assert not (tmp_path / "c").exists()


def test_a_user_without_a_home_has_a_log_and_a_cache(nobody, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert log_file(Path("/m")).is_relative_to(tmp_path / "stepfs-1000660000")
    assert cache_directory.default_cache_dir().is_relative_to(tmp_path / "stepfs-1000660000")


@pytest.mark.parametrize(
    ("options", "said"), [
        ({"memory_bytes": 3 << 30}, True), ({"memory_bytes": 2 << 30}, False), ({"cache_bytes": 3 << 30}, True),
        ({"cache_bytes": 3 << 30, "cache_dir": Path("/c")}, False), ({}, False),
    ],
)  # fmt: skip
def test_a_budget_beyond_the_limit_is_said(monkeypatch, capsys, options, said):
    monkeypatch.setattr(limits, "read_memory", lambda: limits.Memory(2 << 30, 1 << 30, 0.0))
    warn_of_memory(MountOptions("file:///lake", Path("/m"), **options))
    assert ("3.00 GiB is more than this machine or its cgroup has (2.00 GiB)" in capsys.readouterr().err) is said
