"""Fixtures of several tests of runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from forkedworkers import forked_workers


@pytest.fixture
def spawned() -> None:
    """Workers are new interpreters, as they are for users."""


@pytest.fixture(autouse=True)
def _workers(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if "spawned" in request.fixturenames else forked_workers():
        yield
