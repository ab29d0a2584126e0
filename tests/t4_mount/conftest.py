"""Fixtures of several tests of mounts."""

from __future__ import annotations

import pytest
from realmount import lake_with
from steady import steady_lake


@pytest.fixture
def lake(file_url: str) -> str:
    """Three steps of two slices."""
    lake_with(file_url, 3)
    return file_url


@pytest.fixture
def steady(file_url, tmp_path):
    """A lake, and its files beside it."""
    return steady_lake(file_url, tmp_path)


@pytest.fixture
def real_daemons(monkeypatch):
    """New interpreters for all daemons, not processes forked from what has imported everything (`forkeddaemon`)."""
    monkeypatch.setenv("TESTS_REAL_DAEMONS", "1")
