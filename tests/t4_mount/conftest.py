"""Fixtures of several tests of mounts."""

from __future__ import annotations

import pytest
from csinode import Node
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


@pytest.fixture
def other_node(tmp_path, monkeypatch):
    """A function that makes a node, which is ended with the test."""
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "log"))
    made = []

    def make(*before: str, **variables: str | None) -> Node:
        made.append(Node(tmp_path, *before, **variables))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def node(other_node):
    return other_node()
