"""Fixtures of several rooms of this layer."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store


@pytest.fixture
def lake(file_url: str) -> str:
    """A lake of two slices on a real file system."""
    trio.run(partial(create_lake, open_store(file_url), slices=2))
    return file_url
