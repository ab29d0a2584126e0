"""Fixtures of several tests of mounts."""

from __future__ import annotations

import pytest
from realmount import lake_with


@pytest.fixture
def lake(file_url: str) -> str:
    """Three steps of two slices."""
    lake_with(file_url, 3)
    return file_url
