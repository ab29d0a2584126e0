"""Lakes on disk for the tests of `stepfs.reader`, and the rule that no background thread outlives a test."""

from __future__ import annotations

import gc

import pytest
from beside import background_threads, until
from shelf import commit_on_disk, lake_of, lake_on_disk


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A lake of five steps that no test changes."""
    return lake_of(tmp_path_factory.mktemp("lakes"), 5)


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
