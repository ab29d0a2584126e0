"""Lakes on disk for the tests of `stepfs.reader`, and the rule that no background thread outlives a test."""

from __future__ import annotations

import gc

import pytest
from beside import background_threads, until
from shelf import commit_on_disk, lake_on_disk


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A lake of five steps that no test changes."""
    url = (tmp_path_factory.mktemp("lakes") / "lake").as_uri()
    lake_on_disk(url)
    commit_on_disk(url, range(5))
    return url


@pytest.fixture
def url(file_url):
    """One that grows, is sealed, or makes way for another."""
    lake_on_disk(file_url)
    commit_on_disk(file_url, range(5))
    return file_url


@pytest.fixture
def nothing_is_left():
    yield
    gc.collect()
    until(lambda: not background_threads())
