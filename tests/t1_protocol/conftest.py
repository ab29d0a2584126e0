"""Fixtures of several rooms of this layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import trio

from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store


@pytest.fixture(scope="session", autouse=True)
def _small_windows() -> Iterator[None]:
    """Objects here are small, and a window of 8 MiB for each of 16 workers is zeroed at every verification."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepfs.lake.verify.data.WINDOW_BYTES", 64 << 10)
        yield


@pytest.fixture
def lake(file_url: str) -> str:
    """A lake of two slices on a real file system."""
    trio.run(partial(create_lake, open_store(file_url), slices=2))
    return file_url
