"""Fixtures of several tests of mounts."""

from __future__ import annotations

import pytest
from realmount import make_lake, produce


@pytest.fixture
def lake(file_url: str) -> str:
    """Three steps of two slices."""
    make_lake(file_url)
    produce(file_url, 3)
    return file_url
